"""The package alone: what importing it loads, and that its README's example works."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def python(code, **options):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_needs_no_torch():
    loaded = python("import sys, moet_store; print(*sys.modules)").split()
    assert not {"torch", "vllm", "triton", "liburing"} & set(loaded)


def test_every_public_name_exists():
    import moet_store

    assert [name for name in moet_store.__all__ if not hasattr(moet_store, name)] == []


def test_the_readme_example_runs(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    lines = [line for line in example.splitlines() if line and not line.startswith("import ")]
    assert len([line for line in lines if not line.startswith("from ")]) <= 10
    assert python(example, cwd=tmp_path) == "3.0\n"
