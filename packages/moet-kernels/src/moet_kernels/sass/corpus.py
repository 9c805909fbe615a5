"""The corpus: our own kernels, compiled in many ways, for the learner to look at.

They are the CUDA C++ of `corpus`, the twins of our kernels, and the one-operation kernels that the
emulator is tested with.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from moet_kernels.sass.arch import Architecture
from moet_kernels.sass.cubin import Cubin
from moet_kernels.sass.one_op import ptx_module
from moet_kernels.sass.tools import compile_cuda, compile_ptx

__all__ = ["Compiled", "build_corpus"]

_HERE = Path(__file__).parent
# Optimised code teaches latencies; the rest teaches forms that optimised code avoids.
_OPTIONS = {
    "O3": ("-O3",),
    "O2": ("-O2",),
    "O1": ("-O1",),
    "O3-few": ("-O3", "--maxrregcount=32"),
    "O0": ("-O0",),
    "debug": ("-O0", "-g"),
}
SCHEDULED = ("O1", "O2", "O3", "O3-few")


class Compiled(msgspec.Struct, frozen=True):
    """One compiled source file."""

    source: str
    variant: str
    path: Path
    cubin: Cubin

    @property
    def scheduled(self) -> bool:
        """Whether the compiler filled in stalls and scoreboards."""
        return self.variant in SCHEDULED


def sources(arch: Architecture) -> list[Path]:
    """CUDA C++ sources of the corpus and the twins of our kernels."""
    twins = {"sm_90a": ["copy", "w2_gemm_bf16"], "sm_120a": ["copy", "w2_gemm_e4m3"]}[arch.name]
    corpus = sorted((_HERE / "corpus").glob("*.cu"))
    return corpus + [_HERE / "kernels" / f"{name}.cu" for name in twins]


def build_corpus(arch: Architecture, folder: Path) -> list[Compiled]:
    """Compile the corpus into `folder`.

    Raises:
        ToolError: a compiler is missing or refuses a source.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def ptx_of(source: Path) -> Path:
        ptx = folder / f"{source.stem}.{arch.name}.ptx"
        compile_cuda(source, ptx, arch.name)
        return ptx

    with ThreadPoolExecutor(2) as pool:
        ptx_files = list(pool.map(ptx_of, sources(arch)))
        ptx_files.append(folder / f"one_ops.{arch.name}.ptx")
        ptx_files[-1].write_text(ptx_module(arch.name))
        return list(pool.map(_compile, *zip(*_variants(ptx_files, arch, folder), strict=True)))


def _variants(
    ptx_files: list[Path], arch: Architecture, folder: Path
) -> Iterator[tuple[Path, str, str, Path]]:
    for ptx in ptx_files:
        for variant in _OPTIONS:
            yield ptx, variant, arch.name, folder / f"{ptx.stem}.{variant}.cubin"


def _compile(ptx: Path, variant: str, arch: str, path: Path) -> Compiled:
    compile_ptx(ptx, path, arch, *_OPTIONS[variant])
    return Compiled(ptx.stem.split(".")[0], variant, path, Cubin.open(path))
