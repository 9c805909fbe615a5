"""Make the bundle that `device.py` runs: cubins, cases, what the emulator gives, seeded faults."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np

from moet_kernels.sass.arch import SM90A
from moet_kernels.sass.assemble import assemble, disassemble, disassemble_all
from moet_kernels.sass.cases import Case, copy_case, kernel_source, run_case, w2_case
from moet_kernels.sass.cubin import Cubin
from moet_kernels.sass.emulate import Launch, emulate
from moet_kernels.sass.faults import seeded_faults, with_fault
from moet_kernels.sass.hazards import check_hazards
from moet_kernels.sass.link import link
from moet_kernels.sass.machine import Buffer
from moet_kernels.sass.one_op import ONE_OPS, THREADS, inputs_of, ptx_module
from moet_kernels.sass.schedule import safe, tuned
from moet_kernels.sass.source import Program
from moet_kernels.sass.table import Table, committed_table
from moet_kernels.sass.tools import compile_cuda, compile_ptx

__all__ = ["make_bundle"]

_SEEDS = 4
_KERNELS = ("copy", "w2_gemm_bf16")
_MODES = {"safe": safe, "tuned": tuned}


def make_bundle(folder: Path, fault_variants: tuple[str, ...] = ("twin", "tuned")) -> None:
    """Write a bundle for a GPU of compute capability 9.0.

    Args:
        folder: where to.
        fault_variants: which variants of the kernels are given faults.

    Raises:
        ToolError: a program of the CUDA toolkit is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = committed_table(SM90A)
    variants: dict[str, dict[str, str]] = {}
    programs: dict[tuple[str, str], Program] = {}
    for kernel in _KERNELS:
        twin = folder / f"{kernel}.twin.cubin"
        compile_cuda(Path(__file__).parent / "kernels" / f"{kernel}.cu", twin, SM90A.name)
        variants[kernel] = {"twin": twin.name}
        programs[kernel, "twin"] = disassemble(Cubin.open(twin), kernel)
        for mode, schedule in _MODES.items():
            program = schedule(kernel_source(kernel), table)
            words = assemble(program, table)
            path = folder / f"{kernel}.{mode}.cubin"
            path.write_bytes(link(twin.read_bytes(), program, words))
            variants[kernel][mode] = path.name
            programs[kernel, mode] = program
    cases = _cases(folder)
    plan = {
        "variants": variants,
        "cases": cases,
        "times": _times(),
        "one_ops": _one_ops(folder),
        "faults": _faults(folder, programs, table, cases, fault_variants),
        "fault_batch": 12,
        "fault_seconds": 50,
    }
    (folder / "plan.json").write_text(json.dumps(plan))


def _cases(folder: Path) -> list[dict]:
    wanted: list[tuple[str, str, Case]] = [
        ("copy", "copy-50000", copy_case(50_000, 40, 0)),
        ("w2_gemm_bf16", "exact-8x256x2048", _w2(8, 256, 2048, 1, exact=True)),
        ("w2_gemm_bf16", "random-5x512x4096", _w2(5, 512, 4096, 2, exact=False)),
        ("w2_gemm_bf16", "random-13x64x7168", _w2(13, 64, 7168, 3, exact=False)),
        ("w2_gemm_bf16", "random-1x64x2048", _w2(1, 64, 2048, 4, exact=False)),
    ]
    plans = []
    for index, (kernel, name, case) in enumerate(wanted):
        arrays: dict[str, Any] = {f"input{i}": array for i, array in enumerate(case.inputs)}
        arrays["expected"] = run_case(kernel_source(kernel), case)
        if case.expected.dtype == np.float64:
            arrays["reference"] = case.expected
        np.savez_compressed(folder / f"{name}.npz", **arrays)
        plans.append(
            {
                "kernel": kernel,
                "name": name,
                "file": f"{name}.npz",
                "inputs": len(case.inputs),
                "grid": case.grid,
                "threads": case.threads,
                "numbers": case.numbers,
                "repeat": index < 3,
            }
        )
    return plans


def _w2(m: int, n: int, k: int, seed: int, *, exact: bool) -> Case:
    return w2_case("w2_gemm_bf16", m, n, k, seed, exact=exact)


def _times() -> list[dict]:
    vectors = 1 << 26
    m, n, k = 8, 65536, 4096
    weights, scales = n * k // 4, n * k // 32
    return [
        {
            "kernel": "copy",
            "name": "1 GiB",
            "grid": (132 * 8, 1, 1),
            "threads": 256,
            "inputs": [(16 * vectors, 0, 256)],
            "output_bytes": 16 * vectors,
            "numbers": [vectors],
            "moved_bytes": 32 * vectors,
        },
        {
            "kernel": "w2_gemm_bf16",
            "name": f"{m}x{n}x{k}",
            "grid": (n // 16, 1, 1),
            "threads": 128,
            "inputs": [(2 * m * k, 0, 64), (weights, 0, 256), (scales, 120, 132)],
            "output_bytes": 4 * m * n,
            "numbers": [m, n, k],
            "moved_bytes": weights + scales + 2 * m * k + 4 * m * n,
        },
    ]


def _one_ops(folder: Path) -> dict:
    source = folder / "one_ops.ptx"
    source.write_text(ptx_module(SM90A.name))
    cubin = folder / "one_ops.cubin"
    compile_ptx(source, cubin, SM90A.name, "-O3")
    programs = {program.kernel: program for program in disassemble_all([Cubin.open(cubin)])}
    arrays: dict[str, Any] = {}
    opcodes: dict[str, list[str]] = {}
    for op in ONE_OPS:
        for seed in range(_SEEDS):
            words = inputs_of(op.kind, seed)
            buffers = [Buffer.empty(1 << 16, 8 * THREADS), Buffer.of(1 << 20, words)]
            launch = Launch((1, 1, 1), THREADS, struct.pack("<QQ", 1 << 16, 1 << 20))
            report = emulate(programs[op.name], launch, buffers)
            arrays[f"{op.name}.{seed}.in"] = words
            arrays[f"{op.name}.{seed}.out"] = buffers[0].data.view(np.uint32)
            opcodes[op.name] = sorted(report.opcodes)
    np.savez_compressed(folder / "one_ops.npz", **arrays)
    return {
        "file": "one_ops.npz",
        "cubin": cubin.name,
        "names": [op.name for op in ONE_OPS],
        "seeds": _SEEDS,
        "threads": THREADS,
        "opcodes": opcodes,
    }


def _faults(
    folder: Path,
    programs: dict[tuple[str, str], Program],
    table: Table,
    cases: list[dict],
    variants: tuple[str, ...],
) -> list[dict]:
    first_case = {case["kernel"]: i for i, case in reversed(list(enumerate(cases)))}
    faults = []
    for (kernel, variant), program in programs.items():
        if variant not in variants:
            continue
        cubin = Cubin.open(folder / f"{kernel}.{variant}.cubin")
        code = cubin.section(f".text.{kernel}").fields[4]
        words = cubin.words(kernel)
        for fault in seeded_faults(program):
            found = check_hazards(with_fault(program, fault), table)
            old = program.statements[fault.index].control
            assert old is not None
            word = words[fault.index] ^ old.bits ^ fault.control.bits
            faults.append(
                {
                    "case": first_case[kernel],
                    "cubin": f"{kernel}.{variant}.cubin",
                    "variant": variant,
                    "kind": fault.kind,
                    "address": 16 * fault.index,
                    "text": program.statements[fault.index].text,
                    "was": old.text,
                    "now": fault.control.text,
                    "offset": code + 16 * fault.index,
                    "word": word.to_bytes(16, "little").hex(),
                    "found": len(found),
                }
            )
    # Shuffled, so that a run that stops early has seen some of every kind.
    random.Random(0).shuffle(faults)  # noqa: S311
    return faults
