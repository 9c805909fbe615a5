"""Predicts kernels by `moet_kernels.sm120.cycles`; those of sm_90 beside what an H200 measured.

    PYTHONPATH=bench python bench/kernels/cycles.py bench/results/cycles.json [--measured FILE]

Needs the CUDA programs (nvcc, ptxas, nvdisasm) for the twins of sm_90; no GPU. The measured times
are those of bench/results/sass-own.json and, if given, of `cycles_gpu.py`: what the model was made
from knows nothing of them.
"""

import argparse
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import product
from math import prod
from pathlib import Path

import numpy as np
from kernels.cycles_gpu import VARIANTS, Variant

import moet_kernels.sass.kernels
from moet_cli.bench import run_result
from moet_core.results import Measurement, measurement, read_result, write_result
from moet_kernels.sass.arch import SM90A
from moet_kernels.sass.assemble import disassemble
from moet_kernels.sass.cases import copy_case, kernel_source, w2_case
from moet_kernels.sass.cubin import RESERVED_REGISTERS, Cubin
from moet_kernels.sass.emulate import Launch
from moet_kernels.sass.machine import Buffer
from moet_kernels.sass.schedule import safe, tuned
from moet_kernels.sass.source import Program
from moet_kernels.sass.table import committed_table
from moet_kernels.sass.tools import compile_cuda
from moet_kernels.sm120.cards import CARDS
from moet_kernels.sm120.cases import DOWN_ROWS, GATE_UP_ROWS
from moet_kernels.sm120.cases_bf16 import launch_of, make_bf16_case
from moet_kernels.sm120.cycles import Prediction, Processor, predict, trace
from moet_kernels.sm120.manifest import FOLDER
from moet_kernels.sm120.predict import predict_kernel, trace_kernel
from moet_kernels.sm120.predicted import MODELS as GEOMETRIES
from moet_kernels.sm120.predicted import TOKENS
from moet_kernels.sm120.write import KERNELS

ROOT = Path(__file__).parents[2]
# Bandwidth: a device copy's, as published for the card or, for the H200, as measured in the run
# compared with. Latencies: idle ones, from published microbenchmarks.
H200 = Processor(
    name="H200",
    count=132,
    clock=1.98,
    bandwidth=4.155e12,
    memory_latency=480,
    cache_latency=264,
    warps=64,
    shared_bytes=227 * 1024,
    fma_cycles=1,
    matrix_cycles=4,
)
PRO_6000 = CARDS["RTX PRO 6000"]
MODELS = ("GLM-5.2", "DeepSeek-V4-Flash")

PAGE = 1 << 28
BLOCKS = {"copy": 1056, "w2_gemm_bf16": 4096}
NAMES = {"copy": "1 GiB", "w2_gemm_bf16": "8x65536x4096"}


def on_h200(kernel: str, program: Program) -> Prediction:
    """Predict a kernel of the toolchain at the size that was measured."""
    if kernel == "copy":
        case = copy_case(256 * 248, 1, 0)  # a block's part of 2^26 vectors over 1,056 blocks
    else:
        case = w2_case(kernel, 8, 16, 4096, 0, exact=False)
    addresses = [PAGE * (i + 1) for i in range(len(case.inputs) + 1)]
    buffers = [Buffer.empty(addresses[0], case.output_bytes)]
    buffers += [Buffer.of(a, x) for a, x in zip(addresses[1:], case.inputs, strict=True)]
    launch = Launch((1, 1, 1), case.threads, case.parameters(addresses))
    shared_input = PAGE * 2 if kernel != "copy" else 0  # x, which every block reads
    warps = trace(program, launch, buffers, lambda address: address != shared_input)
    registers = program.registers + RESERVED_REGISTERS
    options = {"blocks": BLOCKS[kernel], "shared": program.shared, "registers": registers}
    return predict(program, warps, H200, **options)


def sm90_programs() -> Iterator[tuple[str, str, Program]]:
    """Yield (kernel, variant, program) of what was measured."""
    table = committed_table(SM90A)
    folder = Path(moet_kernels.sass.kernels.__file__).parent
    for kernel in BLOCKS:
        with tempfile.TemporaryDirectory() as temporary:
            cubin = Path(temporary) / "twin.cubin"
            compile_cuda(folder / f"{kernel}.cu", cubin, SM90A.name)
            yield kernel, "twin", disassemble(Cubin.open(cubin), kernel)
        source = kernel_source(kernel)
        yield kernel, "safe", safe(source, table)
        yield kernel, "tuned", tuned(source, table)


def twin_on_h200(variant: Variant) -> Prediction:
    """Predict a twin of an SM120 kernel, compiled for sm_90a, at a size that was measured."""
    rows = DOWN_ROWS if variant.is_down else GATE_UP_ROWS
    sizes = (rows, variant.intermediate) if variant.is_down else (variant.hidden, rows)
    case = make_bf16_case(*sizes, (1,), 0, down=variant.is_down, exact=True)
    launch, buffers = launch_of(case)
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "twin.cubin"
        compile_cuda(FOLDER / f"{variant.kernel}.cu", path, SM90A.name)
        cubin = Cubin.open(path)
    program = disassemble(cubin, variant.kernel)
    warps = trace(program, launch, buffers, lambda address: address == buffers[2].address)
    return predict(
        program,
        warps,
        H200,
        blocks=prod(variant.blocks),
        shared=cubin.shared_bytes(variant.kernel),
        registers=cubin.registers(variant.kernel),
    )


def compared(also: Path | None) -> Iterator[Measurement]:
    """Predicted and measured times of sm_90, and how well they agree."""
    found_there = read_result(ROOT / "bench/results/sass-own.json").measurements
    measured = {one.name: one.median for one in found_there if one.unit == "us"}
    pairs = []
    for kernel, variant, program in sm90_programs():
        found = on_h200(kernel, program)
        truth = measured[f"{kernel} {variant}, {NAMES[kernel]}"]
        pairs.append((found.microseconds, truth))
        yield measurement(f"H200, time: {kernel} {variant}, predicted", "us", [found.microseconds])
        yield measurement(f"H200, time: {kernel} {variant}, measured", "us", [truth])
    times = {} if also is None else {m.name: m.median for m in read_result(also).measurements}
    for variant in VARIANTS if times else ():
        found = twin_on_h200(variant)
        pairs.append((found.microseconds, times[variant.name]))
        for kind, time in zip(("predicted", "measured"), pairs[-1], strict=True):
            yield measurement(f"H200, time: {variant.name}, {kind}", "us", [time])
    ranks = np.argsort(np.argsort(np.array(pairs), axis=0), axis=0)
    yield measurement("H200, agreement: rank correlation", "1", [np.corrcoef(ranks.T)[0, 1]])
    errors = [abs(p / t - 1) for p, t in pairs]
    yield measurement("H200, agreement: error without its sign", "fraction", errors)


def predicted() -> Iterator[Measurement]:
    """Time and share of the memory's peak of every decode kernel, tuned and twin."""
    for model, kernel in product(MODELS, KERNELS):
        if kernel.steps != 4:
            continue
        geometry = GEOMETRIES[model]
        sizes = geometry.hidden, geometry.intermediate
        rows, wanted = (DOWN_ROWS, sizes[0]) if kernel.down else (GATE_UP_ROWS, sizes[1])
        for variant in ("tuned", "twin"):
            traced = trace_kernel(kernel, variant, *sizes)
            for tokens in TOKENS:
                blocks = -(-wanted // rows) * geometry.top_k * tokens
                found = predict_kernel(traced, kernel.name, variant, PRO_6000.processor, blocks)
                share = found.memory_bytes / found.microseconds * 1e6 / PRO_6000.peak
                where = f"{model} {kernel.name}, {variant} {tokens} token{'s'[: tokens > 1]}"
                time, part = f"predicted time: {where}", f"predicted share of GDDR7: {where}"
                yield measurement(time, "us", [found.microseconds])
                yield measurement(part, "fraction", [share])


def main() -> None:
    """Write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--measured", type=Path, help="result of cycles_gpu.py")
    args = parser.parse_args()
    started = datetime.now(UTC)
    measured = [*compared(args.measured), *predicted()]
    card = PRO_6000.processor
    times = ["sass-own.json", *([args.measured.name] if args.measured else [])]
    notes = (
        f"SM120 figures are predictions; no such card was used. H200 times: {', '.join(times)}",
        f"RTX PRO 6000: {card.count} processors at {card.clock} GHz, memory at "
        f"{card.bandwidth / 1e12} TB/s (a device copy) of {PRO_6000.peak / 1e12} TB/s",
        "every token goes through experts of its own; 2 us between two kernels count",
    )
    write_result(args.result, run_result("cycles", started, measured, notes=notes), force=True)


if __name__ == "__main__":
    main()
