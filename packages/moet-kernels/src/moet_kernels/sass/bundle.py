"""Make the bundle that `moet_kernels.sass.gpu` runs: cubins, cases, seeded faults, truths."""

import json
import random
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from moet_core.results import Commit
from moet_kernels.sass.arch import SM90A
from moet_kernels.sass.assemble import assemble, disassemble, disassemble_all
from moet_kernels.sass.cases import Case, copy_case, kernel_source, run_case, w2_case
from moet_kernels.sass.control import Control
from moet_kernels.sass.cubin import Cubin
from moet_kernels.sass.emulate import Launch, emulate
from moet_kernels.sass.faults import seeded_faults, with_fault
from moet_kernels.sass.hazards import check_hazards
from moet_kernels.sass.link import link
from moet_kernels.sass.listing import NOP
from moet_kernels.sass.machine import Buffer
from moet_kernels.sass.one_op import ONE_OPS, THREADS, inputs_of, ptx_module
from moet_kernels.sass.operands import parse
from moet_kernels.sass.schedule import safe, tuned
from moet_kernels.sass.source import Program
from moet_kernels.sass.table import Table, committed_table
from moet_kernels.sass.tools import compile_cuda, compile_ptx, tool_version

__all__ = ["add_kernel", "make_bundle", "new_plan", "plan_faults", "write_case"]

_KERNELS = ("copy", "w2_gemm_bf16")
_MODES = {"safe": safe, "tuned": tuned}
_SEEDS = 4
_FAULT_BATCH = 12

Plan = dict[str, Any]


def make_bundle(
    folder: Path, commit: Commit | None, fault_variants: Sequence[str] = ("tuned",)
) -> Plan:
    """Write a bundle for a GPU of compute capability 9.0, and return its plan.

    Args:
        folder: where to.
        commit: of the checkout that it is made from, for the result files.
        fault_variants: which variants of the kernels are given faults: tuned, safe, twin.

    Raises:
        ToolError: a program of the CUDA toolkit is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = committed_table(SM90A)
    plan = new_plan(table)
    plan["commit"] = msgspec.to_builtins(commit)
    plan["versions"] = {name: tool_version(name) for name in ("ptxas", "nvdisasm")}
    programs: dict[tuple[str, str], Program] = {}
    for kernel in _KERNELS:
        twin = folder / f"{kernel}.twin.cubin"
        compile_cuda(Path(__file__).parent / "kernels" / f"{kernel}.cu", twin, SM90A.name)
        compiled = disassemble(Cubin.open(twin), kernel)
        programs |= add_kernel(plan, folder, kernel, twin.read_bytes(), compiled, table)
    plan["cases"] = _cases(folder)
    plan["times"] = _times()
    plan["one_ops"] = _one_ops(folder)
    wanted = {key: program for key, program in programs.items() if key[1] in fault_variants}
    plan["faults"] = plan_faults(plan, folder, wanted, table)
    (folder / "plan.json").write_text(json.dumps(plan))
    return plan


def new_plan(table: Table) -> Plan:
    """A plan without kernels: the words that cut and blank out instructions."""
    leave = table.encode(parse("EXIT", SM90A)) | Control(5, hold=False).bits
    return {
        "exit": leave.to_bytes(16, "little").hex(),
        "nop": NOP.to_bytes(16, "little").hex(),
        "kernels": {},
        "fault_batch": _FAULT_BATCH,
    }


def add_kernel(
    plan: Plan, folder: Path, kernel: str, twin: bytes, compiled: Program | None, table: Table
) -> dict[tuple[str, str], Program]:
    """Link a kernel, safe and tuned, into copies of its twin and add all three to a plan.

    Args:
        plan: what is added to.
        folder: where the cubins go.
        kernel: which of our kernels.
        twin: its twin's cubin.
        compiled: the twin's program; None where it could not be disassembled.
        table: of the architecture.

    Returns:
        (kernel, variant) -> program.
    """
    programs = {(kernel, "twin"): compiled} if compiled is not None else {}
    images = {"twin": twin}
    for mode, schedule in _MODES.items():
        program = schedule(kernel_source(kernel), table)
        programs[kernel, mode] = program
        images[mode] = link(twin, program, assemble(program, table))
    variants = {}
    for variant, image in images.items():
        cubin, path = Cubin(image), folder / f"{kernel}.{variant}.cubin"
        path.write_bytes(image)
        found = programs.get((kernel, variant))
        variants[variant] = {
            "file": path.name,
            "code_at": cubin.section(f".text.{kernel}").fields[4],
            "count_at": cubin.register_count_at(kernel),
            "texts": [statement.text for statement in found.statements] if found else [],
        }
    plan["kernels"][kernel] = {"variants": variants}
    return programs


def _cases(folder: Path) -> list[dict]:
    wanted: list[tuple[str, str, Case]] = [
        ("copy", "copy-50000", copy_case(50_000, 40, 0)),
        ("w2_gemm_bf16", "exact-8x256x2048", _w2(8, 256, 2048, 1, exact=True)),
        ("w2_gemm_bf16", "random-5x512x4096", _w2(5, 512, 4096, 2, exact=False)),
        ("w2_gemm_bf16", "random-13x64x7168", _w2(13, 64, 7168, 3, exact=False)),
        ("w2_gemm_bf16", "random-1x64x2048", _w2(1, 64, 2048, 4, exact=False)),
    ]
    return [
        write_case(folder, kernel, name, case, repeat=index < 3)
        for index, (kernel, name, case) in enumerate(wanted)
    ]


def write_case(folder: Path, kernel: str, name: str, case: Case, *, repeat: bool) -> dict:
    """Write a case with what the emulator gives, and return its part of the plan."""
    arrays: dict[str, Any] = {f"input{i}": array for i, array in enumerate(case.inputs)}
    arrays["expected"] = run_case(kernel_source(kernel), case)
    if case.expected.dtype == np.float64:
        arrays["reference"] = case.expected
    np.savez_compressed(folder / f"{name}.npz", **arrays)
    return {
        "kernel": kernel,
        "name": name,
        "file": f"{name}.npz",
        "inputs": len(case.inputs),
        "grid": case.grid,
        "threads": case.threads,
        "numbers": case.numbers,
        "repeat": repeat,
    }


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


def plan_faults(
    plan: Plan, folder: Path, programs: Mapping[tuple[str, str], Program], table: Table
) -> list[dict]:
    """Every seeded fault of these programs, with what the hazard checker finds in it."""
    first_case = {case["kernel"]: i for i, case in reversed(list(enumerate(plan["cases"])))}
    faults = []
    for (kernel, variant), program in programs.items():
        described = plan["kernels"][kernel]["variants"][variant]
        words = Cubin.open(folder / described["file"]).words(kernel)
        for fault in seeded_faults(program):
            statement = program.statements[fault.index]
            assert statement.control is not None
            word = words[fault.index] ^ statement.control.bits ^ fault.control.bits
            faults.append(
                {
                    "case": first_case[kernel],
                    "kernel": kernel,
                    "variant": variant,
                    "kind": fault.kind,
                    "index": fault.index,
                    "text": statement.text,
                    "was": statement.control.text,
                    "now": fault.control.text,
                    "word": word.to_bytes(16, "little").hex(),
                    "found": len(check_hazards(with_fault(program, fault), table)),
                }
            )
    # Shuffled, so that a run that stops early has seen some of every kind.
    random.Random(0).shuffle(faults)  # noqa: S311
    return faults
