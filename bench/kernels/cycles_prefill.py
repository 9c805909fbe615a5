"""Predicts the SM120 prefill kernels by `moet_kernels.sm120.cycles`.

    PYTHONPATH=bench python bench/kernels/cycles_prefill.py bench/results/cycles-prefill.json

Needs nvdisasm, no GPU; takes some ten minutes. A launch has one full tile of 16 pairs for each
expert of a layer. Once the weights come from the card's memory, as where each expert has one tile;
once from its cache, as for every further tile of an expert.
"""

import argparse
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

from moet_cli.bench import run_result
from moet_core.results import Measurement, measurement, write_result
from moet_kernels.sass.assemble import disassemble
from moet_kernels.sass.cubin import Cubin
from moet_kernels.sm120.cards import CARDS
from moet_kernels.sm120.cases import CODECS, PREFILL, launch_of, make_case
from moet_kernels.sm120.cycles import Prediction, predict, trace
from moet_kernels.sm120.manifest import FOLDER, cubin_path, read_manifest
from moet_kernels.sm120.predicted import MODELS as GEOMETRIES
from moet_kernels.sm120.write import Kernel
from moet_kernels.sm120.write_tiles import TILES_KERNELS

MODEL = "GLM-5.2"
CARD = CARDS["RTX PRO 6000"]


def predicted(kernel: Kernel, variant: str, *, cached: bool) -> tuple[Prediction, int]:
    """Predict a launch with a tile for each expert; also how many QMMAs it executes."""
    geometry = GEOMETRIES[MODEL]
    n, rows = geometry.intermediate, PREFILL.gate_up_rows
    if kernel.down:
        n, rows = geometry.hidden, PREFILL.down_rows
    sizes = (rows, geometry.intermediate) if kernel.down else (geometry.hidden, rows)
    shape = CODECS[kernel.codec], *sizes, (PREFILL.vectors,), 0
    case = make_case(*shape, down=kernel.down, exact=True, tiling=PREFILL)
    launch, buffers = launch_of(case)
    program = disassemble(Cubin.open(cubin_path(FOLDER, kernel.name, variant)), kernel.name)
    experts = buffers[3].address
    warps = trace(program, launch, buffers, lambda address: address == experts and not cached)
    built = read_manifest().kernels[kernel.name]
    blocks = -(-n // rows) * geometry.experts
    options = {"shared": built.shared, "registers": built.registers[variant]}
    found = predict(program, warps, CARD.processor, blocks=blocks, **options)
    opcodes = [s.instruction.opcode for s in program.statements]
    return found, blocks * sum(opcodes[op.statement] == "QMMA" for warp in warps for op in warp)


def measurements() -> Iterator[Measurement]:
    """Time, and the share of it in which the matrix units are busy."""
    processor = CARD.processor
    kernels = [kernel for kernel in TILES_KERNELS if kernel.steps == 4]
    for kernel, variant in product(kernels, ("tuned", "twin")):
        for where in ("memory", "cache"):
            found, matrix = predicted(kernel, variant, cached=where == "cache")
            cycles = (found.microseconds - processor.launch) * processor.clock * 1000
            busy = matrix * processor.matrix_cycles / (4 * processor.count * cycles)
            place = f"{kernel.name}, {variant}, {where}"
            print(place, found.microseconds, busy, flush=True)
            yield measurement(f"predicted time: {place}", "us", [found.microseconds])
            yield measurement(f"predicted matrix units: {place}", "fraction", [busy])


def main() -> None:
    """Write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("result", type=Path)
    args = parser.parse_args()
    started = datetime.now(UTC)
    found = [*measurements()]
    notes = (
        "all figures are predictions; no such card was used",
        f"{CARD.processor.name}: {CARD.processor.count} processors at {CARD.processor.clock} GHz, "
        f"memory at {CARD.processor.bandwidth / 1e12} TB/s",
        f"{MODEL}: 256 experts, a tile of 16 pairs each, which is what 512 tokens are on average",
    )
    write_result(args.result, run_result("cycles", started, found, notes=notes), force=True)


if __name__ == "__main__":
    main()
