"""From programs to instruction words, and from cubins to programs."""

import re
from collections.abc import Iterator, Sequence

import msgspec

from moet_kernels.sass.arch import Architecture
from moet_kernels.sass.control import Control
from moet_kernels.sass.cubin import RESERVED_REGISTERS, Cubin
from moet_kernels.sass.errors import Flaw, SassError, SourceError
from moet_kernels.sass.listing import disassemble_words
from moet_kernels.sass.operands import NO_REGISTER, parse
from moet_kernels.sass.roles import register_tokens
from moet_kernels.sass.source import Program, Statement, targets
from moet_kernels.sass.table import Form, NoFormError, Table, UnreachableError

__all__ = ["assemble", "disassemble", "disassemble_all", "form_of"]


def assemble(program: Program, table: Table) -> list[int]:
    """Encode a program; every statement needs a control field.

    Raises:
        SourceError: a statement has no known form, operands that the form cannot hold, registers
            out of bounds or misaligned, or no control field.
    """
    if table.arch != program.arch.name:
        raise SassError(f"The program is for {program.arch.name}, the table for {table.arch}.")
    return [_encode(statement, program, table) for statement in program.statements]


def _encode(statement: Statement, program: Program, table: Table) -> int:
    line, column = statement.line, statement.column
    form_of(statement, table)
    try:
        word = table.encode(statement.instruction)
    except UnreachableError as error:
        raise SourceError(Flaw.OPERAND, line, column, str(error)) from None
    for flaw, message in _register_flaws(statement, program, table):
        raise SourceError(flaw, line, column, message)
    if statement.control is None:
        raise SourceError(
            Flaw.CONTROL,
            line,
            column,
            "no control field; write one, or let --control safe or tuned fill them in.",
        )
    return word | statement.control.bits


def form_of(statement: Statement, table: Table) -> Form:
    """Find a statement's form.

    Raises:
        SourceError: compiled code has no such form.
    """
    try:
        return table.form(statement.instruction)
    except NoFormError as error:
        place = statement.line, statement.column
        raise SourceError(Flaw.UNKNOWN_FORM, *place, str(error)) from None


def _register_flaws(
    statement: Statement, program: Program, table: Table
) -> Iterator[tuple[Flaw, str]]:
    named = register_tokens(statement.instruction)
    roles = table.form(statement.instruction).roles
    for (_, file, number), role in zip(named, roles, strict=False):
        zero = program.arch.uniform_zero if file == "UR" else NO_REGISTER
        if file not in ("R", "UR") or number == zero:
            continue
        width = max(role.writes, role.reads, 1)
        unit = 1 if width == 1 else 2 if width == 2 else 4
        if number % unit:
            yield (
                Flaw.ALIGNMENT,
                (f"{file}{number} begins {width} registers and must be divisible by {unit}."),
            )
        if file == "R" and number + width > program.registers:
            yield (
                Flaw.REGISTER_BOUND,
                (
                    f"R{number + width - 1} is used, but .registers declares {program.registers} "
                    f"(R0 to R{program.registers - 1})."
                ),
            )


def disassemble(cubin: Cubin, kernel: str) -> Program:
    """Read a kernel of a cubin; the branch to itself and the NOPs behind it are left out.

    Raises:
        SassError: there is no such kernel, or it has words that are no instructions.
    """
    words = cubin.words(kernel)
    return _program(cubin, kernel, disassemble_words(words, cubin.arch), 0)


def disassemble_all(cubins: Sequence[Cubin]) -> list[Program]:
    """Read all kernels of cubins of one architecture, with few runs of `nvdisasm`."""
    words = [word for cubin in cubins for kernel in cubin.kernels for word in cubin.words(kernel)]
    texts = disassemble_words(words, cubins[0].arch)
    programs, at = [], 0
    for cubin in cubins:
        for kernel in cubin.kernels:
            count = len(cubin.words(kernel))
            programs.append(_program(cubin, kernel, texts[at : at + count], 16 * at))
            at += count
    return programs


def _program(cubin: Cubin, kernel: str, texts: Sequence[str | None], base: int) -> Program:
    statements = _statements(cubin.words(kernel), texts, cubin.arch, base)
    return Program(
        cubin.arch,
        kernel,
        cubin.registers(kernel) - RESERVED_REGISTERS,
        tuple(_without_padding(statements)),
        None,
        cubin.shared_bytes(kernel),
        cubin.parameter_bytes(kernel),
    )


def _statements(
    words: Sequence[int], texts: Sequence[str | None], arch: Architecture, base: int
) -> list[Statement]:
    """Make statements of a kernel's words, whose texts were read at address `base`."""
    statements = []
    for index, (word, text) in enumerate(zip(words, texts, strict=True)):
        address = 16 * index
        if text is None:
            raise SassError(f"The word {word:#034x} at {address:#x} is no instruction.")
        statement = Statement(parse(text, arch, base + address), text, address, Control.of(word))
        for target in targets(statement):
            local = re.sub(rf"{target + base:#x}\b", hex(target), text)
            statement = msgspec.structs.replace(statement, text=local)
        statements.append(statement)
    return statements


def _without_padding(statements: list[Statement]) -> list[Statement]:
    last = len(statements)
    while last and statements[last - 1].instruction.opcode == "NOP":
        last -= 1
    if last and targets(statements[last - 1]) == [statements[last - 1].address]:
        last -= 1
    return statements[:last]
