"""The parsers are useful alone."""

import subprocess
import sys


def test_importing_them_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, moet_vllm.parsers, moet_vllm.parsers.effort, moet_vllm.parsers.history\n"
        "import moet_vllm.parsers.registration, moet_vllm.parsers.shapes\n"
        "sys.exit(bool({'vllm', 'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
