"""The `.sass` source format.

    // A comment runs to the end of the line.
    .arch sm_90a
    .kernel copy            name of the kernel
    .twin copy.cu           CUDA C++ source of the kernel that computes the same
    .registers 32           registers the code may name, R0 to R31; 253 at most
    .shared 0               bytes of static shared memory
    .parameters 20          bytes of kernel parameters
    loop:
      [B0-----:R-:W-:-:S04] @!P0 IADD3 R4, R4, 0x1, RZ
      @P0 BRA loop

One instruction a line, in `nvdisasm`'s words, a semicolon at its end allowed; the control field in
brackets is optional. A label can stand wherever a branch target does.
"""

import re

import msgspec

from moet_kernels.sass.arch import Architecture, architecture
from moet_kernels.sass.control import Control, parse_control
from moet_kernels.sass.cubin import MOST_REGISTERS
from moet_kernels.sass.errors import Flaw, SassError, SourceError
from moet_kernels.sass.operands import Instruction, parse

__all__ = ["Program", "Statement", "parse_source", "write_source"]

_LABEL = re.compile(r"\s*([A-Za-z_.][\w.]*):\s*$")
_DIRECTIVE = re.compile(r"\s*\.(\w+)\s+(\S+)\s*$")
_STATEMENT = re.compile(r"(\s*)(?:\[([^\]]*:S[^\]]*)\]\s*)?(.*?)\s*;?\s*$")
_NUMBERS = ("registers", "shared", "parameters")
_WORDS = ("arch", "kernel", "twin")
_REQUIRED = ("arch", "kernel", "registers")


class Statement(msgspec.Struct, frozen=True):
    """One instruction of a program.

    Attributes:
        instruction: what it does.
        text: as written, labels replaced by addresses.
        address: its byte address.
        control: its control field, None where the source has none.
        line: where it stands in the source, from 1; 0 for what has no source.
        column: likewise.
    """

    instruction: Instruction
    text: str
    address: int
    control: Control | None = None
    line: int = 0
    column: int = 0


class Program(msgspec.Struct, frozen=True):
    """A kernel.

    Attributes:
        arch: what it runs on.
        kernel: its name.
        registers: how many registers the code may name; the cubin counts RESERVED_REGISTERS more.
        statements: its instructions.
        twin: file name of its CUDA C++ twin, None for none.
        shared: bytes of static shared memory.
        parameters: bytes of kernel parameters.
    """

    arch: Architecture
    kernel: str
    registers: int
    statements: tuple[Statement, ...]
    twin: str | None = None
    shared: int = 0
    parameters: int = 0

    @property
    def exits(self) -> list[int]:
        """Addresses of the EXIT instructions."""
        return [s.address for s in self.statements if s.instruction.opcode == "EXIT"]


def parse_source(text: str) -> Program:
    """Read a source file.

    Raises:
        SourceError: a line is wrong; the error says which, where and why.
    """
    directives: dict[str, str] = {}
    labels: dict[str, int] = {}
    lines: list[tuple[int, int, str | None, str]] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("//", 1)[0].rstrip()
        if not line.strip():
            continue
        label = _LABEL.match(line)
        if label:
            if label[1] in labels:
                raise SourceError(Flaw.LABEL, number, 1, f"{label[1]} is defined twice.")
            labels[label[1]] = 16 * len(lines)
        elif line.lstrip().startswith("."):
            _directive(line, number, directives)
        else:
            match = _STATEMENT.match(line)
            if match is None or not match[3]:
                raise SourceError(Flaw.SYNTAX, number, 1, f"{line.strip()!r} is no instruction.")
            lines.append((number, match.start(3) + 1, match[2], match[3]))
    for name in _REQUIRED:
        if name not in directives:
            raise SourceError(Flaw.DIRECTIVE, 1, 1, f".{name} is missing.")
    try:
        arch = architecture(directives["arch"])
    except SassError as error:
        raise SourceError(Flaw.DIRECTIVE, 1, 1, str(error)) from None
    statements = tuple(_statement(16 * i, line, labels, arch) for i, line in enumerate(lines))
    return Program(
        arch,
        directives["kernel"],
        int(directives["registers"]),
        statements,
        directives.get("twin"),
        int(directives.get("shared", 0)),
        int(directives.get("parameters", 0)),
    )


def _directive(line: str, number: int, directives: dict[str, str]) -> None:
    match = _DIRECTIVE.match(line)
    if match is None or match[1] not in (*_NUMBERS, *_WORDS):
        known = ", ".join(f".{name}" for name in (*_WORDS, *_NUMBERS))
        message = f"{line.strip()!r} is no directive; there are {known}, each with one value."
        raise SourceError(Flaw.DIRECTIVE, number, 1, message)
    name, value = match[1], match[2]
    if name in directives:
        raise SourceError(Flaw.DIRECTIVE, number, 1, f".{name} is given twice.")
    if name in _NUMBERS and not value.isdigit():
        raise SourceError(
            Flaw.DIRECTIVE, number, match.start(2) + 1, f".{name} wants a number, not {value!r}."
        )
    if name == "registers" and int(value) > MOST_REGISTERS:
        message = f".registers wants at most {MOST_REGISTERS}, not {value}."
        raise SourceError(Flaw.DIRECTIVE, number, match.start(2) + 1, message)
    directives[name] = value


def _statement(
    address: int,
    line: tuple[int, int, str | None, str],
    labels: dict[str, int],
    arch: Architecture,
) -> Statement:
    number, column, control_text, text = line
    control = None
    if control_text is not None:
        try:
            control = parse_control(control_text)
        except SassError as error:
            raise SourceError(Flaw.CONTROL, number, 1, str(error)) from None
    words = re.split(r"([\s,]+)", text)
    text = "".join(hex(labels[word]) if word in labels else word for word in words)
    try:
        instruction = parse(text, arch, address)
    except SassError as error:
        raise SourceError(Flaw.SYNTAX, number, column, str(error)) from None
    target = next((o for o in instruction.operands if re.search(r"[a-z_]", o.template[:1])), None)
    if target is not None and not target.template.startswith(("c[", "cx[", "desc[")):
        message = f"{target.template!r} is no operand, and no label of this file."
        raise SourceError(Flaw.LABEL, number, column + text.find(target.template), message)
    return Statement(instruction, text, address, control, number, column)


def write_source(program: Program) -> str:
    """Write a program as source text, branch targets as labels.

    `parse_source` reads back the same instructions, controls and directives.
    """
    lines = [f".arch {program.arch.name}", f".kernel {program.kernel}"]
    if program.twin:
        lines.append(f".twin {program.twin}")
    lines.append(f".registers {program.registers}")
    lines += [f".shared {program.shared}", f".parameters {program.parameters}"]
    end = 16 * len(program.statements)
    names: dict[int, str] = {}
    for address in sorted({t for s in program.statements for t in targets(s) if t < end}):
        names[address] = f"L{len(names)}"
    for statement in program.statements:
        if statement.address in names:
            lines.append(f"{names[statement.address]}:")
        text = statement.text
        for target in targets(statement):
            if target in names:
                text = re.sub(rf"{target:#x}\b", names[target], text)
        prefix = f"[{statement.control.text}] " if statement.control else ""
        lines.append(f"  {prefix}{text}")
    return "\n".join(lines) + "\n"


def targets(statement: Statement) -> list[int]:
    """Addresses that a branch can go to."""
    if statement.instruction.opcode in ("RET", "BRX", "JMX"):
        return []
    return [
        (operand.values[-1] + statement.address + 16) & ((1 << 64) - 1)
        for operand in statement.instruction.operands
        if operand.template == "L"
    ]
