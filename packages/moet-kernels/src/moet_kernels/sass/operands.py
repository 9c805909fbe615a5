"""Instruction text, as `nvdisasm` writes it, taken apart and into numbers.

`parse` splits `@!P0 IADD3 R4, R2.reuse, -R3, 0x10` into a mnemonic, operands, and from them

- a **key**: the text with every register, predicate and number replaced by a letter. Two
  instructions with the same key differ in numbers alone; a key names a form of the encoding.
- **slots**: those numbers and the flags (negation, reuse, ...), in a fixed order.

The learner finds which bits of a word each slot has, the assembler inverts that, the emulator
executes the operands. What the text leaves out because it is the default (a zero offset, the guard
@PT) is put in, so that a default and a value share a form.
"""

import functools
import re
import struct
from collections.abc import Iterator

import msgspec

from moet_kernels.sass.arch import Architecture
from moet_kernels.sass.errors import SassError

__all__ = ["NO_PREDICATE", "NO_REGISTER", "Instruction", "Operand", "parse"]

NO_REGISTER = 255  # RZ
NO_PREDICATE = 7  # PT, UPT
_WORD = (1 << 64) - 1

_HEAD = re.compile(r"(?:@(!?)(U?P[T\d])\s+)?([A-Z][\w.]*)\s*(.*)$")
_SPLIT = re.compile(r",(?![^\[]*\])(?![^{]*\})")
_TOKEN = re.compile(
    r"(?P<special>SR_?[A-Z][A-Z0-9_.]*)"
    r"|\b(?P<register>U?R(?:Z|\d+))\b"
    r"|\b(?P<predicate>U?P(?:T|\d))\b"
    r"|\b(?P<barrier>S?B\d+)\b"
    r"|(?P<hex>[-+]?0x[0-9a-f]+)"
    r"|(?P<bits>0f[0-9a-f]{4}(?:[0-9a-f]{4})?)\b"
    r"|(?<![\w.])(?P<number>[-+]?(?:\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+|INF|QNAN|SNAN|\d+)\b)"
)
_REGISTER_TAIL = re.compile(r"\bU?R(?:Z|\d+)\b(\|?(?:\.\w+)*)")
_NUMBER = re.compile(r"[-+]?(?:0x[0-9a-f]+|\d.*|INF|QNAN|SNAN)")
_BRACKET = re.compile(r"\[([^\[\]]+)\]")
_OFFSET = re.compile(r"[-+]0x[0-9a-f]+$|^-?0x[0-9a-f]+$")

_RELATIVE = frozenset({"BRA", "BSSY", "CALL", "WARPSYNC", "BRX", "JMP", "RET", "PREEXIT"})
_FLOAT32 = frozenset(
    [
        "FADD",
        "FMUL",
        "FFMA",
        "FSETP",
        "FSEL",
        "FMNMX",
        "FMNMX3",
        "FCHK",
        "MUFU",
        "F2F",
        "F2FP",
        "FSET",
        "FADD32I",
        "FMUL32I",
        "FFMA32I",
        "UFFMA",
        "UFADD",
        "UFMUL",
        "UFSETP",
        "UFSEL",
        "UFMNMX",
        "FRND",
        "FSWZADD",
        "F2I",
    ]
)


class Operand(msgspec.Struct, frozen=True):
    """One operand.

    Attributes:
        template: the text with a letter for each number: `R`, `UR`, `P`, `UP`, `B`, `SB`, and `I`
            (integer), `F`, `H`, `D` (bits of an immediate float), `L` (distance from the next
            instruction, in bytes). Examples: `R`, `c[I][I]`, `desc[UR][R.64+I]`, `SR_TID.X`.
        values: those numbers, as unsigned 64-bit integers.
        negate: `-`.
        absolute: `|x|`.
        invert: `~`.
        not_: `!`.
        reuse: for each register, whether it has `.reuse`.
    """

    template: str
    values: tuple[int, ...]
    negate: bool = False
    absolute: bool = False
    invert: bool = False
    not_: bool = False
    reuse: tuple[bool, ...] = ()

    @property
    def is_memory(self) -> bool:
        """Whether this is an address in memory."""
        return "[" in self.template and not self.template.startswith("c")

    @property
    def is_predicate(self) -> bool:
        """Whether this is a predicate register."""
        return self.template in ("P", "UP")

    @property
    def is_value(self) -> bool:
        """Whether this is a register or a constant, which can carry flags."""
        return self.template.startswith(("R", "UR", "c[", "cx["))

    @property
    def key(self) -> str:
        """The template, with those flags that are part of the form."""
        if self.is_value or self.is_predicate:
            return self.template
        flags = "-" * self.negate + "~" * self.invert + "|" * self.absolute + "!" * self.not_
        return flags + self.template

    @property
    def slots(self) -> tuple[int, ...]:
        """The numbers and flags that the form leaves open."""
        if self.is_memory:
            return (*self.values, *self.reuse)
        if self.is_value:
            flags = (self.negate, self.absolute, self.invert, any(self.reuse))
            return (*self.values, *(int(flag) for flag in flags))
        if self.is_predicate:
            return (*self.values, int(self.not_))
        return self.values


class Instruction(msgspec.Struct, frozen=True):
    """One instruction without its control fields.

    Attributes:
        mnemonic: with modifiers, `LDG.E.128.CONSTANT`.
        operands: in the order of the text.
        guard: the guard predicate's number, NO_PREDICATE for none.
        guard_not: whether the guard is negated.
        guard_uniform: whether the guard is a uniform predicate.
    """

    mnemonic: str
    operands: tuple[Operand, ...]
    guard: int = NO_PREDICATE
    guard_not: bool = False
    guard_uniform: bool = False

    @property
    def opcode(self) -> str:
        """The mnemonic without modifiers."""
        return self.mnemonic.split(".", 1)[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        """The parts of the mnemonic after the opcode."""
        return tuple(self.mnemonic.split(".")[1:])

    @property
    def key(self) -> str:
        """The name of the form."""
        return _key_of(self)

    @property
    def slots(self) -> tuple[int, ...]:
        """The numbers that the form leaves open: the guard's, then each operand's."""
        guard = (int(self.guard_not), self.guard)
        return guard + tuple(slot for operand in self.operands for slot in operand.slots)


@functools.lru_cache(1 << 16)  # the schedulers ask for the same program hundreds of times
def _key_of(instruction: Instruction) -> str:
    guard = "@UP" if instruction.guard_uniform else "@P"
    operands = ",".join(operand.key for operand in instruction.operands)
    return f"{guard} {instruction.mnemonic} {operands}"


def parse(text: str, arch: Architecture, address: int = 0) -> Instruction:
    """Take one instruction apart.

    Args:
        text: as `nvdisasm` writes it, branch targets as addresses, without the semicolon.
        arch: whose instruction it is.
        address: byte address of the instruction, from which branch distances count.

    Raises:
        SassError: the text is no instruction.
    """
    match = _HEAD.match(text.strip())
    if match is None:
        raise SassError(f"{text!r} is no instruction: wanted a mnemonic in capital letters.")
    guard_not, guard, mnemonic, rest = match.groups()
    # One encoding, two names: nvdisasm says IMAD.SHL where the factor is a power of two.
    mnemonic = mnemonic.replace("IMAD.SHL", "IMAD")
    try:
        operands = tuple(
            _operand(part.strip(), mnemonic, arch, address)
            for part in _SPLIT.split(rest)
            if part.strip()
        )
    except (ValueError, OverflowError) as error:
        raise SassError(f"{text!r} is no instruction: {error}.") from error
    if guard is None:
        return Instruction(mnemonic, operands)
    number = NO_PREDICATE if guard.endswith("T") else int(guard[-1])
    return Instruction(mnemonic, operands, number, bool(guard_not), guard.startswith("U"))


def _operand(text: str, mnemonic: str, arch: Architecture, address: int) -> Operand:
    constant = text.lstrip("-|~").startswith(("c[", "cx["))
    memory = "[" in text and not constant
    reuse = tuple(".reuse" in tail for tail in _REGISTER_TAIL.findall(text))
    text = text.replace(".reuse", "")
    negate = invert = not_ = absolute = False
    if memory or constant:
        text = _BRACKET.sub(_with_offset, text) if memory else _constant_with_offset(text)
    if not memory and not _NUMBER.fullmatch(text):
        negate, text = text.startswith("-"), text.removeprefix("-")
        not_, text = text.startswith("!"), text.removeprefix("!")
        invert, text = text.startswith("~"), text.removeprefix("~")
        if text.startswith("|"):
            absolute, text = True, text.replace("|", "", 2)
    template, values = "", []
    position = 0
    for token, letter, value in _tokens(text, mnemonic, arch, address, signed=memory or constant):
        template += text[position : token.start()] + letter
        position = token.end()
        if value is not None:
            values.append(value)
    template += text[position:]
    return Operand(template, tuple(values), negate, absolute, invert, not_, reuse)


def _with_offset(match: re.Match[str]) -> str:
    inner = match[1]
    # The descriptor in desc[UR4][...] is no address.
    if match.string[: match.start()].endswith("desc") or _OFFSET.search(inner):
        return f"[{inner.replace('+-0x', '-0x')}]"
    return f"[{inner}+0x0]"


def _constant_with_offset(text: str) -> str:
    text = text.replace("+-0x", "-0x")
    if "cx[" in text:
        return text
    return re.sub(r"\[(U?R\w+(?:\.\w+)?)\]", r"[\1+0x0]", text)


def _tokens(
    text: str, mnemonic: str, arch: Architecture, address: int, *, signed: bool
) -> Iterator[tuple[re.Match[str], str, int | None]]:
    opcode = mnemonic.split(".", 1)[0]
    for token in _TOKEN.finditer(text):
        kind, found = token.lastgroup, token.group()
        if kind == "special":
            yield token, found, None
        elif kind == "register":
            zero = arch.uniform_zero if found.startswith("U") else NO_REGISTER
            number = zero if found.endswith("Z") else int(found.lstrip("UR"))
            yield token, found.rstrip("Z0123456789"), number
        elif kind == "predicate":
            number = NO_PREDICATE if found.endswith("T") else int(found[-1])
            yield token, found[:-1], number
        elif kind == "barrier":
            yield token, found.rstrip("0123456789"), int(found.lstrip("SB"))
        elif kind == "hex":
            value = int(found, 16)
            if opcode in _RELATIVE:
                yield token, "L", (value - address - 16) & _WORD
            else:
                yield token, "+I" if signed and found[0] in "+-" else "I", value & _WORD
        elif kind == "bits":
            yield token, _float_letter(opcode), int(found[2:], 16)
        else:
            letter, bits = _number(found, opcode, mnemonic)
            yield token, letter, bits


def _float_letter(opcode: str) -> str:
    """Which kind of immediate float an opcode takes; N where it takes integers."""
    if opcode in _FLOAT32:
        return "F"
    if opcode.startswith("H") and opcode != "HMMA":
        return "H"
    if opcode.startswith("D") and opcode not in ("DEPBAR", "DMMA"):
        return "D"
    return "N"


def _number(text: str, opcode: str, mnemonic: str) -> tuple[str, int]:
    letter = _float_letter(opcode)
    if letter == "N":
        return letter, int(text) & _WORD
    if text.endswith("NAN"):
        raise ValueError(f"{text} does not say which NaN; write its bits, as in 0f7fc00000")
    if letter == "F":
        return letter, _float_bits(text, "f", "I")
    if letter == "D":
        return letter, _float_bits(text, "d", "Q") >> 32
    if "BF16" in mnemonic:
        return letter, _float_bits(text, "f", "I") >> 16
    return letter, _float_bits(text, "e", "H")


def _float_bits(text: str, code: str, integer: str) -> int:
    (bits,) = struct.unpack(f"<{integer}", struct.pack(f"<{code}", float(text)))
    return int(bits)
