"""`moet kernels`: the SASS toolchain on files."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moet_cli import kernel_results as results
from moet_cli.output import Group, Output, command, make_table
from moet_core.errors import ConfigError, MoetError, UsageError

if TYPE_CHECKING:  # the toolchain is imported when it is used
    from moet_kernels.sass.cubin import Cubin
    from moet_kernels.sass.source import Program
    from moet_kernels.sass.table import Table

__all__ = ["kernels"]

CONTROLS = ("source", "safe", "tuned")
_SHAPE = (5, 32, 2048)
_MOST_ERROR = 1e-6


def run_asm(output: Output, source: Path, control: str, twin: Path | None, out: Path) -> None:
    """Assemble a source file into a copy of its twin's cubin.

    Raises:
        MoetError: the source is wrong, the twin does not fit, or the file cannot be written.
    """
    from moet_kernels.sass.assemble import assemble

    with _named(source):
        program, table = _scheduled(_read(source), control)
        words = assemble(program, table)
    image = _linked(program, words, source, twin)
    try:
        out.write_bytes(image)
    except OSError as error:
        raise ConfigError(f"The cubin {out} cannot be written: {error.strerror}.") from error
    output.result(
        {"event": "asm", "kernel": program.kernel, "instructions": len(words), "out": str(out)},
        f"{program.kernel}: {len(words)} instructions for {program.arch.name} in {out}",
    )


def run_disasm(output: Output, cubin_path: Path, kernel: str | None) -> None:
    """Write a kernel of a cubin as source text.

    Raises:
        MoetError: it is no cubin, or has no such kernel.
    """
    from moet_kernels.sass.assemble import disassemble
    from moet_kernels.sass.source import write_source

    with _named(cubin_path):
        cubin, name = _cubin(cubin_path, kernel)
        text = write_source(disassemble(cubin, name))
    output.result({"event": "disasm", "kernel": name, "source": text}, text.rstrip())


def run_audit(output: Output, cubin_path: Path, kernel: str | None) -> None:
    """Check a kernel of a cubin without running it.

    Raises:
        MoetError: the audit found something, or cannot read the file.
    """
    from moet_kernels.sass.audit import audit as check
    from moet_kernels.sass.table import committed_table

    with _named(cubin_path):
        cubin, name = _cubin(cubin_path, kernel)
        findings = check(cubin, name, committed_table(cubin.arch))
    rows = [(f.rule, f"{f.address:#06x}", f.instruction, f.message) for f in findings]
    shown: Any = f"{name}: nothing found"
    if findings:
        shown = make_table(f"Findings in {name}", ("rule", "at", "instruction", "what"), rows)
    output.result({"event": "audit", "kernel": name, "findings": findings}, shown)
    if findings:
        raise MoetError(f"The audit of {name} in {cubin_path} found {len(findings)} flaws.")


def run_emulate(
    output: Output, source: Path, shape: Sequence[int] | None, seed: int, exact: bool
) -> None:
    """Run one of our kernels in the emulator on random data.

    Raises:
        MoetError: the source is wrong, the kernel faulted, or its result is wrong.
        UsageError: the kernel is none of ours, or the shape is none that it takes.
    """
    import numpy as np

    from moet_kernels.sass.cases import copy_case, run_case, w2_case

    with _named(source):
        program = _read(source)
    if program.arch.name == "sm_120a" and _emulate_sm120(output, program, shape, seed, exact):
        return
    if program.kernel == "copy":
        if shape is not None or exact:
            raise UsageError("copy has no shape, and its result is always exact.")
        case = copy_case(4096, 2, seed)
    elif program.kernel in ("w2_gemm_bf16", "w2_gemm_e4m3"):
        m, n, k = _fitting(shape or _SHAPE)
        case = w2_case(program.kernel, m, n, k, seed, exact=exact)
    else:
        raise UsageError(
            f"{program.kernel} is none of our kernels (copy, w2_gemm_bf16, w2_gemm_e4m3, those of "
            "moet_kernels.sm120), so there is no data for it; call "
            "moet_kernels.sass.emulate.emulate with your own."
        )
    with _named(source):
        data = run_case(program, case)
    if case.expected.dtype == np.float64:
        got = data.view(np.float32).reshape(case.expected.shape)
        error = float(np.abs(got - case.expected).max() / np.abs(case.expected).max())
        equal = bool((got == case.expected).all())
    else:
        equal = bool((data == case.expected).all())
        error = 0.0 if equal else 1.0
    output.result(
        {"event": "emulate", "kernel": program.kernel, "exact": equal, "relative_error": error},
        f"{program.kernel}: {'exact' if equal else f'relative error {error:.2e}'}",
    )
    allowed = 0.0 if exact else _MOST_ERROR
    if not error <= allowed:
        raise MoetError(
            f"{program.kernel} has a relative error of {error:.2e}; {allowed:g} is allowed."
        )


def _emulate_sm120(
    output: Output, program: "Program", shape: Sequence[int] | None, seed: int, exact: bool
) -> bool:
    """Run one of the SM120 expert kernels on random data; False if the program is none."""
    from moet_kernels.sm120 import cases, cases_bf16
    from moet_kernels.sm120.activations import steps_of
    from moet_kernels.sm120.build import ALL_KERNELS
    from moet_kernels.sm120.write_tiles import TILES_KERNELS

    kernel = next((one for one in ALL_KERNELS if one.name == program.kernel), None)
    if kernel is None:
        return False
    tiling = cases.PREFILL if kernel in TILES_KERNELS else cases.DECODE
    rows = 64 if kernel in TILES_KERNELS else 32
    unit = 32 * kernel.steps
    m, n, k = shape or (5, 64, 9 * unit)
    multiple = f"an odd multiple of {unit}" if kernel.steps == 2 else f"a multiple of {unit}"
    fits = 1 <= m <= tiling.vectors and n >= rows and n % rows == 0
    if not fits or k < 1 or k % unit or steps_of(k) != kernel.steps:
        raise UsageError(
            f"--shape {m} {n} {k}: wanted M of 1 to {tiling.vectors}, N a multiple of {rows}, "
            f"K {multiple}."
        )
    sizes = (*((n, k) if kernel.down else (k, n)), (m,), seed)
    if kernel.codec == "bf16":
        case = cases_bf16.make_bf16_case(*sizes, down=kernel.down, exact=exact)
        flaw = cases_bf16.mistake(case, cases_bf16.run_case(program, case))
    else:
        codec = cases.CODECS[kernel.codec]
        case = cases.make_case(codec, *sizes, down=kernel.down, exact=exact, tiling=tiling)
        flaw = cases.mistake(case, cases.run_case(program, case))
    output.result(
        {"event": "emulate", "kernel": kernel.name, "exact": exact, "flaw": flaw},
        f"{kernel.name}: {flaw or ('exact' if exact else 'within 1e-6')}",
    )
    if flaw:
        raise MoetError(f"{kernel.name} is wrong: {flaw}")
    return True


def run_verify(output: Output, source: Path) -> None:
    """Assemble safe and tuned, link, audit both against the source, and emulate.

    Raises:
        MoetError: any of these failed.
    """
    from moet_kernels.sass.assemble import assemble
    from moet_kernels.sass.audit import audit as check
    from moet_kernels.sass.cubin import Cubin

    with _named(source):
        read = _read(source)
    for control in ("safe", "tuned"):
        with _named(source):
            program, table = _scheduled(read, control)
            words = assemble(program, table)
        image = _linked(program, words, source, None)
        findings = check(Cubin(image), program.kernel, table, program)
        cycles = sum(s.control.stall for s in program.statements if s.control)
        output.result(
            {
                "event": "verify",
                "kernel": program.kernel,
                "control": control,
                "instructions": len(words),
                "stalls": cycles,
                "findings": findings,
            },
            f"{program.kernel} {control}: {len(words)} instructions, {len(findings)} findings",
        )
        if findings:
            raise MoetError(f"The audit of {program.kernel} ({control}): {findings[0].message}")
    run_emulate(output, source, None, 0, exact=program.kernel != "copy")


def run_verify_device(output: Output) -> None:
    """Load every SM120 kernel on this machine's GPU and ask it what is known.

    Raises:
        ConfigError: there is no SM120 GPU.
        MoetError: a kernel was refused or wrong.
    """
    import torch

    from moet_kernels.arch import capability, runs_sm120
    from moet_kernels.sm120.driver import CudaDriver
    from moet_kernels.sm120.trust import examine, report

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not runs_sm120(device):
        found = capability(device)
        what = "no NVIDIA GPU" if found is None else "sm_{}{}".format(*found)
        raise ConfigError(
            f"verify --device needs an NVIDIA GPU of sm_120, found {what}. Other devices use the "
            "portable kernels, which need no such test."
        )
    driver = CudaDriver(device)
    answers = examine(driver)
    flawed = [answer for answer in answers if answer.flaw is not None]
    columns = "kernel", "variant", "answer"
    rows = report(answers)
    found_kernels = [dict(zip(columns, row, strict=True)) for row in rows]
    output.result(
        {"event": "verify-device", "device": driver.identity, "kernels": found_kernels},
        make_table(f"SM120 kernels on {driver.identity}", columns, rows),
    )
    if flawed:
        raise MoetError(f"{len(flawed)} of {len(answers)} kernels may not be used here.")


def _read(source: Path) -> "Program":
    from moet_kernels.sass.source import parse_source

    try:
        text = source.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is no text: byte {error.start} is not UTF-8.") from None
    return parse_source(text)


def _scheduled(program: "Program", control: str) -> tuple["Program", "Table"]:
    from moet_kernels.sass.schedule import safe, tuned
    from moet_kernels.sass.table import committed_table

    table = committed_table(program.arch)
    if control != "source":
        program = {"safe": safe, "tuned": tuned}[control](program, table)
    return program, table


def _linked(program: "Program", words: Sequence[int], source: Path, twin: Path | None) -> bytes:
    from moet_kernels.sass.link import link
    from moet_kernels.sass.tools import compile_cuda

    if twin is not None:
        with _named(twin):
            return link(twin.read_bytes(), program, words)
    if program.twin is None:
        raise UsageError(f"{source} names no .twin; add one, or give its cubin with --twin.")
    cuda = source.parent / program.twin
    if not cuda.is_file():
        raise ConfigError(f"{source} names the twin {program.twin}, but there is no {cuda}.")
    with tempfile.TemporaryDirectory() as folder, _named(cuda):
        cubin = Path(folder) / "twin.cubin"
        compile_cuda(cuda, cubin, program.arch.name)
        return link(cubin.read_bytes(), program, words)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Begin the message of a toolchain error with the file that it is about."""
    from moet_kernels.sass.errors import SassError

    try:
        yield
    except SassError as error:
        raise MoetError(f"{path}: {error}") from error


def _cubin(path: Path, wanted: str | None) -> tuple["Cubin", str]:
    from moet_kernels.sass.cubin import Cubin

    cubin = Cubin.open(path)
    if wanted is None and len(cubin.kernels) == 1:
        return cubin, cubin.kernels[0]
    if not cubin.kernels:
        raise ConfigError(f"{path} has no kernel.")
    if wanted is None or wanted not in cubin.kernels:
        raise UsageError(f"Choose a kernel with --kernel: {', '.join(cubin.kernels)}.")
    return cubin, wanted


def _fitting(shape: Sequence[int]) -> tuple[int, int, int]:
    m, n, k = shape
    if m < 1 or n < 1 or k < 1 or n % 16 or k % 128:
        raise UsageError(
            f"--shape {m} {n} {k}: wanted M of 1 or more, N a multiple of 16, K one of 128."
        )
    return m, n, k


_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)
_FOLDER = click.Path(path_type=Path, file_okay=False)
_kernel_option = click.option("--kernel", help="Which kernel of the cubin.")
_force = click.option("--force", is_flag=True, help="Replace result files that exist.")


@click.group("kernels", cls=Group)
def kernels() -> None:
    """Assemble, disassemble, audit, emulate and verify SASS kernels."""


@command(kernels, "asm")
@click.argument("source", type=_FILE)
@click.option("--control", type=click.Choice(CONTROLS), default="tuned", show_default=True)
@click.option("--twin", type=_FILE, help="Cubin of the twin; compiled with nvcc if not given.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def asm_command(output: Output, source: Path, control: str, twin: Path | None, out: Path) -> None:
    """Assemble SOURCE into a copy of its twin's cubin."""
    run_asm(output, source, control, twin, out)


@command(kernels, "disasm")
@click.argument("cubin", type=_FILE)
@_kernel_option
def disasm_command(output: Output, cubin: Path, kernel: str | None) -> None:
    """Write a kernel of CUBIN as source text."""
    run_disasm(output, cubin, kernel)


@command(kernels, "audit")
@click.argument("cubin", type=_FILE)
@_kernel_option
def audit_command(output: Output, cubin: Path, kernel: str | None) -> None:
    """Check a kernel of CUBIN without running it."""
    run_audit(output, cubin, kernel)


@command(kernels, "emulate")
@click.argument("source", type=_FILE)
@click.option("--shape", type=(int, int, int), help=f"M, N and K of a GEMM; {_SHAPE} if not given.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--exact", is_flag=True, help="Data of which every partial sum is a float32.")
def emulate_command(
    output: Output, source: Path, shape: tuple[int, int, int] | None, seed: int, exact: bool
) -> None:
    """Run one of our kernels in the emulator on random data."""
    run_emulate(output, source, shape, seed, exact)


@command(kernels, "verify")
@click.argument("source", type=_FILE, required=False)
@click.option("--device", is_flag=True, help="Test the SM120 kernels on this machine's GPU.")
def verify_command(output: Output, source: Path | None, device: bool) -> None:
    """Assemble, link, audit and emulate SOURCE, safe and tuned; or test kernels on the GPU."""
    if device == (source is not None):
        raise UsageError("Give either a source file or --device.")
    if source is None:
        run_verify_device(output)
    else:
        run_verify(output, source)


@command(kernels, "learn")
@click.argument("folder", type=_FOLDER)
def learn_command(output: Output, folder: Path) -> None:
    """Learn the tables of every architecture anew and write them into FOLDER."""
    results.run_learn(output, folder)


@command(kernels, "measure")
@click.option("--splits", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
@_force
def measure_command(output: Output, splits: int, out: Path, force: bool) -> None:
    """Learn the corpus, and halves of it, and write what the tables get right."""
    results.run_measure(output, splits, out, force)


@command(kernels, "bundle")
@click.argument("folder", type=_FOLDER)
def bundle_command(output: Output, folder: Path) -> None:
    """Write into FOLDER what `python -m moet_kernels.sass.gpu FOLDER OUT` runs on a GPU."""
    results.run_bundle(output, folder)


@command(kernels, "record")
@click.argument("bundle", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.argument("found", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--to", "folder", type=_FOLDER, required=True, help="Folder of the result files.")
@_force
def record_command(output: Output, bundle: Path, found: Path, folder: Path, force: bool) -> None:
    """Make result files of what a GPU gave for BUNDLE in FOUND."""
    results.run_record(output, bundle, found, folder, force)
