"""Make the files of the CUDA kernels: `python -m moet_kernels.portable.build [--check]`.

They are committed, so that a user needs no CUDA toolkit: PTX of the decode kernels, which the
driver compiles, and machine code of the prefill kernels, which are for sm_90 alone.
`manifest.json` has the SHA-256 of them and of all that they were made from. `--check` makes
everything anew and compares.
"""

import re
import sys
import tempfile
from pathlib import Path

import msgspec

from moet_kernels import committed
from moet_kernels.committed import builder, differing, digest, write_manifest
from moet_kernels.portable import cuts, tile_cuts
from moet_kernels.portable.native import FOLDER, VERSIONS, ptx_path
from moet_kernels.portable.native_tiles import cubin_path
from moet_kernels.sass.tools import compile_cuda, compile_ptx, tool_version

__all__ = ["SOURCES", "Manifest", "build", "differences", "read_manifest"]

SOURCES = (
    "codecs.cuh",
    "copies.cuh",
    "cuts.inc",
    "limbs.cuh",
    "step.cuh",
    "stream.cu",
    "stream.cuh",
    "tiles.cu",
    "tiles.cuh",
    "tiles.inc",
    "wgmma.cuh",
)

_PTX_VERSION = "8.3"
"""What drivers since CUDA 12.3 read; nothing in the kernels is newer, and ptxas looks."""


class Manifest(msgspec.Struct, frozen=True):
    """SHA-256 of sources and compiled files by file name, and the nvcc that made those."""

    nvcc: str
    sources: dict[str, str]
    compiled: dict[str, str]


def read_manifest(folder: Path = FOLDER) -> Manifest:
    """Read the manifest of a folder."""
    return committed.read_manifest(folder, Manifest)


def build(out: Path) -> Manifest:
    """Write both .inc, the compiled files and the manifest into a folder with the other sources.

    Raises:
        ToolError: A program of the CUDA toolkit is missing, or refuses a source.
    """
    (out / "cuts.inc").write_text(cuts.include_text())
    (out / "tiles.inc").write_text(tile_cuts.include_text())
    cubin = cubin_path(out)
    compile_cuda(out / "tiles.cu", cubin, "sm_90a")
    compiled = {cubin.name: digest(cubin.read_bytes())}
    for number in VERSIONS:
        path = ptx_path(number, out)
        compile_cuda(out / "stream.cu", path, f"sm_{number}")
        text = path.read_text()
        text = re.sub(r"^\.version .*$", f".version {_PTX_VERSION}", text, flags=re.MULTILINE)
        text = re.sub(r"^//.*\n", "", text, flags=re.MULTILINE)  # the compiler's build number
        path.write_text(text)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as unused:
            compile_ptx(path, Path(unused.name), f"sm_{number}")
        compiled[path.name] = digest(path.read_bytes())
    sources = {name: digest((out / name).read_bytes()) for name in SOURCES}
    manifest = Manifest(tool_version("nvcc"), sources, compiled)
    write_manifest(out, manifest)
    return manifest


def differences(folder: Path = FOLDER) -> list[str]:
    """Make everything anew elsewhere and list the files that differ from the committed ones."""
    with tempfile.TemporaryDirectory() as name:
        fresh = Path(name)
        for source in SOURCES:
            (fresh / source).write_bytes((folder / source).read_bytes())
        build(fresh)
        return differing(fresh, folder)


def main(arguments: list[str]) -> int:
    """Build into the package, or check; the exit status."""
    return builder(
        "moet_kernels.portable.build",
        arguments,
        build=lambda: [f"{name} {value}" for name, value in build(FOLDER).compiled.items()],
        differences=differences,
        same="the compiled files are what their sources give",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
