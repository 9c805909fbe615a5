"""Times the twins of the w2 bfloat16 kernels on a GPU of sm_90, for `cycles.py` to compare with.

    python bench/kernels/cycles_gpu.py build FOLDER             # needs nvcc, no GPU
    python bench/kernels/cycles_gpu.py measure FOLDER RESULT    # needs the GPU, torch, numpy

They are the loops of the SM120 kernels: the same source, compiled for sm_90a. Each answers its
known questions before it is timed. A time is that of a CUDA graph of launches, each with experts of
its own, divided by their number.
"""

import argparse
import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moet_core.errors import MoetError
from moet_core.results import Measurement, measurement, write_result
from moet_core.row import row_layout
from moet_kernels.sass.arch import SM90A
from moet_kernels.sass.tools import compile_cuda
from moet_kernels.sm120.cases import DOWN_ROWS, GATE_UP_ROWS, GROUP, THREADS
from moet_kernels.sm120.manifest import FOLDER

if TYPE_CHECKING:
    import torch

    from moet_kernels.sm120.driver import CudaDriver

__all__ = ["VARIANTS", "Variant"]


class Variant(NamedTuple):
    """A kernel at a size: hidden and intermediate columns, and experts with one vector each."""

    kernel: str
    hidden: int
    intermediate: int
    experts: int

    @property
    def name(self) -> str:
        """How results call it."""
        return f"{self.kernel} {self.hidden}x{self.intermediate}, {self.experts} experts"

    @property
    def is_down(self) -> bool:
        """Whether it is a down projection."""
        return "down" in self.kernel

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Grid of a launch."""
        rows, wanted = (
            (DOWN_ROWS, self.hidden) if self.is_down else (GATE_UP_ROWS, self.intermediate)
        )
        return -(-wanted // rows), self.experts, 1


VARIANTS = (
    Variant("bf16_gate_up", 6144, 2048, 8),
    Variant("bf16_gate_up", 6144, 2048, 32),
    Variant("bf16_gate_up", 2048, 2048, 8),
    Variant("bf16_gate_up_k64", 6080, 2048, 8),
    Variant("bf16_down", 6144, 2048, 8),
    Variant("bf16_down", 6144, 2048, 32),
    Variant("bf16_down", 6144, 512, 8),
    Variant("bf16_down_k64", 6144, 1984, 8),
)
_POOL_BYTES = 3 << 30  # far more than the second-level cache holds
_LAUNCHES, _SAMPLES = 24, 20


def build(folder: Path) -> None:
    """Compile the twins for sm_90a."""
    folder.mkdir(parents=True, exist_ok=True)
    for kernel in sorted({variant.kernel for variant in VARIANTS}):
        compile_cuda(FOLDER / f"{kernel}.cu", folder / f"{kernel}.cubin", SM90A.name)


def measured(folder: Path) -> Iterator[Measurement]:
    """Yield the times of all variants.

    Raises:
        MoetError: a kernel answers wrongly.
    """
    import torch

    from moet_kernels.sm120.driver import CudaDriver
    from moet_kernels.sm120.questions import QUESTIONS

    driver = CudaDriver(torch.device("cuda", 0))
    functions = {}
    for kernel in sorted({variant.kernel for variant in VARIANTS}):
        functions[kernel] = driver.load((folder / f"{kernel}.cubin").read_bytes(), kernel)
        flaw, _ = QUESTIONS[kernel](driver, functions[kernel])
        if flaw is not None:
            raise MoetError(f"{kernel}, compiled for sm_90a, is wrong: {flaw}")
    memory = torch.randint(0, 256, (_POOL_BYTES,), dtype=torch.uint8, device=driver.device)
    for variant in VARIANTS:
        samples = _times(driver, functions[variant.kernel], variant, memory)
        yield measurement(variant.name, "us", samples)


def _times(
    driver: "CudaDriver", function: Any, variant: Variant, memory: "torch.Tensor"
) -> list[float]:
    import torch

    layout = row_layout("w2", variant.hidden, variant.intermediate)
    slots = len(memory) // layout.row_bytes
    pool = memory[: slots * layout.row_bytes].view(slots, layout.row_bytes)
    for section in (layout.scales13, layout.scales2):
        pool[:, section.slice] = 120  # 2^-7: sums stay numbers
    k, n, sections = variant.hidden, variant.intermediate, (layout.codes13, layout.scales13)
    if variant.is_down:
        k, n, sections = n, k, (layout.codes2, layout.scales2)
    vectors = torch.randn(variant.experts, k, device=driver.device).bfloat16()
    dtype = torch.float32 if variant.is_down else torch.bfloat16
    out = driver.empty((variant.experts, n), dtype)
    launches = []
    for launch in range(_LAUNCHES):
        groups = np.zeros(variant.experts, GROUP)
        chosen = (launch * variant.experts + np.arange(variant.experts)) % slots
        groups["row"] = pool.data_ptr() + chosen * layout.row_bytes
        groups["count"] = 1
        groups["pair"][:, 0] = groups["token"][:, 0] = np.arange(variant.experts)
        made = torch.from_numpy(groups.view(np.uint8)).to(driver.device)
        numbers = k, n, *(section.offset for section in sections)
        parameters = struct.pack(
            "<4Q4I", made.data_ptr(), vectors.data_ptr(), 0, out.data_ptr(), *numbers
        )
        if not variant.is_down:
            parameters += struct.pack("<QfI", 0, float("inf"), 0)
        launches.append((made, parameters))

    def run() -> None:
        for _, parameters in launches:
            driver.launch(function, variant.blocks, THREADS, parameters, ())

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    found = []
    for _ in range(_SAMPLES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1000 * start.elapsed_time(end) / _LAUNCHES)
    return found


def main() -> None:
    """Build, or measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("build", "measure"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path, nargs="?")
    args = parser.parse_args()
    if args.what == "build":
        build(args.folder)
        return
    if args.result is None:
        parser.error("measure needs the file that it writes")
    from moet_cli.bench import run_result

    started = datetime.now(UTC)
    notes = (
        f"graphs of {_LAUNCHES} launches, each with experts of its own, one vector an expert",
        "CUDA C++ twins of the SM120 kernels, compiled for sm_90a",
    )
    result = run_result("cycles-gpu", started, list(measured(args.folder)), notes=notes)
    write_result(args.result, result, force=True)


if __name__ == "__main__":
    main()
