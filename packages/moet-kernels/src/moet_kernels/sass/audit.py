"""Audit a cubin: everything about a kernel that can be checked without running it."""

from collections.abc import Iterator

import msgspec

from moet_kernels.sass.assemble import assemble, disassemble
from moet_kernels.sass.cubin import EXIT_OFFSETS, RESERVED_REGISTERS, Cubin
from moet_kernels.sass.errors import SassError
from moet_kernels.sass.hazards import check_hazards
from moet_kernels.sass.operands import NO_REGISTER
from moet_kernels.sass.precedent import unprecedented
from moet_kernels.sass.roles import register_tokens
from moet_kernels.sass.source import Program
from moet_kernels.sass.table import Table

__all__ = ["Finding", "audit"]


class Finding(msgspec.Struct, frozen=True):
    """Something wrong.

    Attributes:
        rule: "form", "precedent", "text", "hazard", "registers", "barriers" or "exits".
        address: of the instruction; 0 where it is about the whole kernel.
        instruction: its text.
        message: what was wanted and found.
    """

    rule: str
    address: int
    instruction: str
    message: str


def audit(cubin: Cubin, kernel: str, table: Table, source: Program | None = None) -> list[Finding]:
    """Check a kernel of a cubin.

    Args:
        cubin: where it is.
        kernel: its name.
        table: of the cubin's architecture.
        source: what it was assembled from, controls filled in; None: only the cubin is checked.

    Rules: every instruction has a form that compiled code has, assembles to the very words that are
    there, and has no flag, default or control field that compiled code never has there; the text
    that `nvdisasm` shows is the source's, token for token; no hazard; no register that the cubin
    does not count or reserves; BAR only with barriers that it declares; the list of EXITs.
    """
    program = disassemble(cubin, kernel)
    findings = list(_forms(program, cubin, kernel, table))
    if source is not None:
        findings += _texts(program, source)
    findings += [
        Finding("hazard", h.address, h.instruction, f"{h.register}, {h.kind}: {h.message}")
        for h in check_hazards(program, table)
    ]
    findings += _registers(program)
    findings += _barriers(program, cubin, kernel)
    findings += _exits(program, cubin, kernel)
    return findings


def _forms(program: Program, cubin: Cubin, kernel: str, table: Table) -> Iterator[Finding]:
    words = cubin.words(kernel)
    for statement, word in zip(program.statements, words, strict=False):
        assert statement.control is not None
        alone = msgspec.structs.replace(program, statements=(statement,))
        try:
            (again,) = assemble(alone, table)
        except SassError as error:
            yield Finding("form", statement.address, statement.text, str(error))
            continue
        if again != word:
            message = f"assembles to {again:#034x}, the cubin has {word:#034x}."
            yield Finding("form", statement.address, statement.text, message)
        for message in unprecedented(statement.instruction, statement.control, table):
            yield Finding("precedent", statement.address, statement.text, message)


def _texts(program: Program, source: Program) -> Iterator[Finding]:
    if len(program.statements) != len(source.statements):
        message = (
            f"the cubin has {len(program.statements)} instructions, the source "
            f"{len(source.statements)}."
        )
        yield Finding("text", 0, "", message)
    for found, wanted in zip(program.statements, source.statements, strict=False):
        if (found.instruction, found.control) != (wanted.instruction, wanted.control):
            message = f"the source has `{wanted.text}`."
            yield Finding("text", found.address, found.text, message)


def _registers(program: Program) -> Iterator[Finding]:
    for statement in program.statements:
        for _, file, number in register_tokens(statement.instruction):
            if file == "R" and number != NO_REGISTER and number >= program.registers:
                message = (
                    f"R{number} is named; the cubin counts "
                    f"{program.registers + RESERVED_REGISTERS} registers, of which compiled code "
                    f"never names the last {RESERVED_REGISTERS}."
                )
                yield Finding("registers", statement.address, statement.text, message)


def _barriers(program: Program, cubin: Cubin, kernel: str) -> Iterator[Finding]:
    # Attribute 0x4c, NUM_BARRIERS; absent where a kernel has none.
    declared = next((a.value for a in cubin.attributes(f".nv.info.{kernel}") if a.code == 0x4C), 0)
    for statement in program.statements:
        if statement.instruction.opcode != "BAR":
            continue
        first = statement.instruction.operands[0] if statement.instruction.operands else None
        if first is not None and first.template == "I" and first.values[0] >= declared:
            message = f"barrier {first.values[0]} is used, the cubin declares {declared}."
            yield Finding("barriers", statement.address, statement.text, message)


def _exits(program: Program, cubin: Cubin, kernel: str) -> Iterator[Finding]:
    for attribute in cubin.attributes(f".nv.info.{kernel}"):
        if attribute.code == EXIT_OFFSETS:
            data = attribute.payload
            listed = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
            if sorted(listed) != sorted(program.exits):
                message = (
                    f"the cubin lists EXITs at {listed}, the code has them at {program.exits}."
                )
                yield Finding("exits", 0, "", message)
