"""`moet kernels`: the SASS toolchain on files."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from moet_cli.output import Output, make_table
from moet_core.errors import MoetError, UsageError

__all__ = ["kernels"]

CONTROLS = ("source", "safe", "tuned")


def run_asm(output: Output, source: Path, control: str, twin: Path | None, out: Path) -> None:
    """Assemble a source file into a copy of its twin's cubin.

    Raises:
        MoetError: the source is wrong, or the twin does not fit.
    """
    from moet_kernels.sass.assemble import assemble
    from moet_kernels.sass.link import link

    program, table = _program(source, control)
    words = assemble(program, table)
    with tempfile.TemporaryDirectory() as folder:
        shell = twin or _compile_twin(program, source, Path(folder))
        image = link(shell.read_bytes(), program, words)
    out.write_bytes(image)
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
    from moet_kernels.sass.cubin import Cubin
    from moet_kernels.sass.source import write_source

    cubin = Cubin.open(cubin_path)
    name = _kernel(cubin, kernel)
    text = write_source(disassemble(cubin, name))
    output.result({"event": "disasm", "kernel": name, "source": text}, text.rstrip())


def run_audit(output: Output, cubin_path: Path, kernel: str | None) -> None:
    """Check a kernel of a cubin without running it.

    Raises:
        MoetError: the audit found something, or cannot read the file.
    """
    from moet_kernels.sass.audit import audit as check
    from moet_kernels.sass.cubin import Cubin
    from moet_kernels.sass.table import committed_table

    cubin = Cubin.open(cubin_path)
    name = _kernel(cubin, kernel)
    findings = check(cubin, name, committed_table(cubin.arch))
    rows = [(f.rule, f"{f.address:#06x}", f.instruction, f.message) for f in findings]
    shown: Any = f"{name}: nothing found"
    if findings:
        shown = make_table(f"Findings in {name}", ("rule", "at", "instruction", "what"), rows)
    output.result({"event": "audit", "kernel": name, "findings": findings}, shown)
    if findings:
        raise MoetError(f"The audit of {name} in {cubin_path} found {len(findings)} flaws.")


def run_emulate(output: Output, source: Path, shape: Sequence[int], seed: int, exact: bool) -> None:
    """Run one of our kernels in the emulator on random data.

    Raises:
        MoetError: the kernel faulted, or its result is wrong.
    """
    import numpy as np

    from moet_kernels.sass.cases import copy_case, run_case, w2_case
    from moet_kernels.sass.source import parse_source

    program = parse_source(source.read_text())
    if program.kernel == "copy":
        case = copy_case(4096, 2, seed)
    elif program.kernel.startswith("w2_gemm_"):
        m, n, k = shape
        case = w2_case(program.kernel, m, n, k, seed, exact=exact)
    else:
        raise UsageError(
            f"{program.kernel} is none of our kernels (copy, w2_gemm_bf16, w2_gemm_e4m3), so there "
            "is no data for it; call moet_kernels.sass.emulate.emulate with your own."
        )
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
    if error > 1e-6:
        raise MoetError(f"{program.kernel} has a relative error of {error:.2e}; 1e-6 is allowed.")


def run_verify(output: Output, source: Path) -> None:
    """Assemble safe and tuned, link, audit both against the source, and emulate.

    Raises:
        MoetError: any of these failed.
    """
    from moet_kernels.sass.assemble import assemble
    from moet_kernels.sass.audit import audit as check
    from moet_kernels.sass.cubin import Cubin
    from moet_kernels.sass.link import link

    for control in ("safe", "tuned"):
        program, table = _program(source, control)
        words = assemble(program, table)
        with tempfile.TemporaryDirectory() as folder:
            twin = _compile_twin(program, source, Path(folder))
            image = link(twin.read_bytes(), program, words)
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
    run_emulate(output, source, (5, 32, 2048), 0, exact=True)


def _program(source: Path, control: str) -> tuple[Any, Any]:
    from moet_kernels.sass.schedule import safe, tuned
    from moet_kernels.sass.source import parse_source
    from moet_kernels.sass.table import committed_table

    program = parse_source(source.read_text())
    table = committed_table(program.arch)
    if control != "source":
        program = {"safe": safe, "tuned": tuned}[control](program, table)
    return program, table


def _compile_twin(program: Any, source: Path, folder: Path) -> Path:
    from moet_kernels.sass.tools import compile_cuda

    if program.twin is None:
        raise UsageError(f"{source} names no .twin; add one, or give its cubin with --twin.")
    cubin = folder / "twin.cubin"
    compile_cuda(source.parent / program.twin, cubin, program.arch.name)
    return cubin


def _kernel(cubin: Any, wanted: str | None) -> str:
    if wanted is None and len(cubin.kernels) == 1:
        return cubin.kernels[0]
    if wanted is None or wanted not in cubin.kernels:
        raise UsageError(f"Choose a kernel with --kernel: {', '.join(cubin.kernels)}.")
    return wanted


def _switches(function: Any) -> Any:
    """Add --json, which every command takes, and hand over the `Output`."""

    def set_json(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value:
            ctx.ensure_object(Output).json = True

    def set_verbose(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value:
            ctx.ensure_object(Output).verbose = True

    text = "Print JSON, one object a line, and nothing else on standard output."
    function = click.pass_obj(function)
    function = click.option(
        "--json", is_flag=True, is_eager=True, expose_value=False, callback=set_json, help=text
    )(function)
    return click.option(
        "--verbose",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=set_verbose,
        help="Show the traceback of an error.",
    )(function)


_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)
_kernel_option = click.option("--kernel", help="Which kernel of the cubin.")


@click.group("kernels")
def kernels() -> None:
    """Assemble, disassemble, audit, emulate and verify SASS kernels."""


@kernels.command("asm")
@click.argument("source", type=_FILE)
@click.option("--control", type=click.Choice(CONTROLS), default="tuned", show_default=True)
@click.option("--twin", type=_FILE, help="Cubin of the twin; compiled with nvcc if not given.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
@_switches
def asm_command(output: Output, source: Path, control: str, twin: Path | None, out: Path) -> None:
    """Assemble SOURCE into a copy of its twin's cubin."""
    run_asm(output, source, control, twin, out)


@kernels.command("disasm")
@click.argument("cubin", type=_FILE)
@_kernel_option
@_switches
def disasm_command(output: Output, cubin: Path, kernel: str | None) -> None:
    """Write a kernel of CUBIN as source text."""
    run_disasm(output, cubin, kernel)


@kernels.command("audit")
@click.argument("cubin", type=_FILE)
@_kernel_option
@_switches
def audit_command(output: Output, cubin: Path, kernel: str | None) -> None:
    """Check a kernel of CUBIN without running it."""
    run_audit(output, cubin, kernel)


@kernels.command("emulate")
@click.argument("source", type=_FILE)
@click.option("--shape", type=(int, int, int), default=(5, 32, 2048), help="M, N and K.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--exact", is_flag=True, help="Data of which every partial sum is a float32.")
@_switches
def emulate_command(
    output: Output, source: Path, shape: tuple[int, int, int], seed: int, exact: bool
) -> None:
    """Run one of our kernels in the emulator on random data."""
    run_emulate(output, source, shape, seed, exact)


@kernels.command("verify")
@click.argument("source", type=_FILE)
@_switches
def verify_command(output: Output, source: Path) -> None:
    """Assemble, link, audit and emulate SOURCE, safe and tuned."""
    run_verify(output, source)
