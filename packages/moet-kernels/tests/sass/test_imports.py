import subprocess
import sys


def test_the_toolchain_imports_no_torch():
    code = (
        "import sys, moet_kernels.sass.emulate, moet_kernels.sass.build, moet_kernels.sass.audit;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_runs_on_a_gpu_imports_numpy_alone():
    code = (
        "import sys, moet_kernels.sass.gpu.__main__;"
        "sys.exit(any(name in sys.modules for name in ('msgspec', 'torch', 'moet_core')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
