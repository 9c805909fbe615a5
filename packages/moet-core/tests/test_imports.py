import pkgutil
import subprocess
import sys

import moet_core

MODULES = sorted(module.name for module in pkgutil.iter_modules(moet_core.__path__))


def test_core_needs_neither_torch_nor_vllm():
    imports = "; ".join(f"import moet_core.{name}" for name in MODULES)
    check = "import sys; print(sorted({'torch', 'vllm', 'safetensors'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"{imports}; {check}"], capture_output=True, text=True, check=True
    )
    assert "codecs" in MODULES
    assert done.stdout == "[]\n"
