"""Programs of the CUDA toolkit: where they are, and how they are run.

Looked for on PATH, then in the PyPI wheels nvidia-cuda-nvcc, nvidia-cuda-nvdisasm and
nvidia-cuda-cuobjdump of the running Python.
"""

import functools
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from moet_kernels.sass.errors import ToolError

__all__ = ["compile_cuda", "compile_ptx", "find_tool", "have_tools", "run_tool", "tool_version"]

_WHEEL = {
    "ptxas": "nvidia-cuda-nvcc",
    "nvcc": "nvidia-cuda-nvcc",
    "nvdisasm": "nvidia-cuda-nvdisasm",
    "cuobjdump": "nvidia-cuda-cuobjdump",
}


@functools.cache
def find_tool(name: str) -> Path:
    """Find a program of the CUDA toolkit.

    Raises:
        ToolError: it is nowhere; the message names the wheel that has it.
    """
    site = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    folders = sorted((str(folder) for folder in site.glob("cu*/bin")), reverse=True)
    # The wheels first: a toolkit on PATH can be too old to know sm_120a.
    found = shutil.which(name, path=os.pathsep.join(folders)) or shutil.which(name)
    if found is None:
        raise ToolError(
            f"The program {name} was found neither in this Python's wheels nor on PATH; "
            f"pip install {_WHEEL.get(name, name)}, or make the environment with nox -s sass."
        )
    return Path(found)


def have_tools(*names: str) -> bool:
    """Whether all these programs can be found."""
    try:
        for name in names:
            find_tool(name)
    except ToolError:
        return False
    return True


def run_tool(name: str, args: Sequence[str | Path]) -> str:
    """Run a program and return its standard output.

    Raises:
        ToolError: it is missing or failed; the message carries what it said.
    """
    done = subprocess.run(
        [str(find_tool(name)), *map(str, args)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        command = " ".join((name, *map(str, args)))
        raise ToolError(f"`{command}` failed with {done.returncode}: {said[:2000]}", said)
    return done.stdout


def tool_version(name: str) -> str:
    """The release that a program says it is, `13.5.37`."""
    for word in run_tool(name, ["--version"]).replace(",", " ").split():
        if word.startswith("V") and word[1:2].isdigit():
            return word[1:]
    raise ToolError(f"{name} --version names no release.")


def compile_ptx(source: Path, cubin: Path, arch: str, *options: str) -> None:
    """Compile PTX with `ptxas`."""
    run_tool("ptxas", [f"-arch={arch}", *options, source, "-o", cubin])


def compile_cuda(source: Path, out: Path, arch: str, *options: str) -> None:
    """Compile CUDA C++ with `nvcc` to what the suffix of `out` says: .cubin or .ptx."""
    include = find_tool("nvcc").resolve().parent.parent / "include" / "cccl"
    kind = "-ptx" if out.suffix == ".ptx" else "-cubin"
    run_tool("nvcc", [f"-arch={arch}", kind, f"-I{include}", *options, source, "-o", out])
