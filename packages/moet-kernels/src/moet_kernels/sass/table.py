"""Encoding tables: which bits of a word each slot of each form has, and their use.

A form is one sample word, the slots it shows, and for every bit that changes only slots the change
it makes. The effect of bits is linear over GF(2) (the learner checks it), so encoding is solving
`slots of the sample XOR effects of the flipped bits = wanted slots`.
"""

import functools
import gzip
from collections.abc import Iterable
from pathlib import Path

import msgspec

from moet_kernels.sass.arch import Architecture
from moet_kernels.sass.control import CONTROL_MASK
from moet_kernels.sass.errors import SassError
from moet_kernels.sass.operands import Instruction

__all__ = [
    "Form",
    "NoFormError",
    "Roles",
    "Table",
    "Timing",
    "UnreachableError",
    "committed_table",
    "load",
    "save",
]

_SLOT_BITS = 64


class NoFormError(SassError):
    """No instruction of this form was ever seen from the compiler."""


class UnreachableError(SassError):
    """A form is known, but no word of it has these operands."""


class Roles(msgspec.Struct, frozen=True, array_like=True):
    """How an instruction uses the registers that one operand names.

    Attributes:
        writes: how many consecutive registers are written, from the named one on.
        reads: how many are read.
    """

    writes: int = 0
    reads: int = 0


class Form(msgspec.Struct, frozen=True, array_like=True):
    """One form of the encoding.

    Attributes:
        base: sample word in hexadecimal, control field cleared.
        slots: what the sample shows.
        bits: bit -> ((slot, mask), ...): flipping the bit XORs mask into the slot.
        roles: for each register-like token of the operands, in order, how it is used.
        marks: (bits seen set, bits seen clear), see `moet_kernels.sass.precedent`.
    """

    base: str
    slots: tuple[int, ...]
    bits: dict[int, tuple[tuple[int, int], ...]]
    roles: tuple[Roles, ...] = ()
    marks: tuple[int, int] = (0, 0)

    def encode(self, slots: tuple[int, ...]) -> int | None:
        """Find the word that shows these slots; None if there is none."""
        pivots = _pivots(self)
        rest = _join(self.slots) ^ _join(slots)
        word = int(self.base, 16)
        while rest:
            found = pivots.get(rest.bit_length())
            if found is None:
                return None
            rest ^= found[0]
            word ^= found[1]
        return word


@functools.lru_cache(maxsize=4096)
def _pivots_of(
    bits: tuple[tuple[int, tuple[tuple[int, int], ...]], ...],
) -> dict[int, tuple[int, int]]:
    """Bring the effects of the bits into echelon form: leading bit -> (effect, bits to flip)."""
    pivots: dict[int, tuple[int, int]] = {}
    for bit, changes in bits:
        effect, flips = 0, 1 << bit
        for slot, mask in changes:
            effect |= mask << _SLOT_BITS * slot
        while effect:
            length = effect.bit_length()
            if length not in pivots:
                pivots[length] = (effect, flips)
                break
            effect ^= pivots[length][0]
            flips ^= pivots[length][1]
    return pivots


def _pivots(form: Form) -> dict[int, tuple[int, int]]:
    return _pivots_of(tuple(sorted(form.bits.items())))


def _join(slots: Iterable[int]) -> int:
    return sum(int(value) << _SLOT_BITS * i for i, value in enumerate(slots))


class Timing(msgspec.Struct, frozen=True):
    """How the compiler times instructions; see `moet_kernels.sass.timing`.

    Attributes:
        variable: opcodes whose results need a scoreboard.
        late: opcodes that may read their sources after they issued.
        raw: "producer>consumer:operand" -> fewest cycles seen between the two.
        war: "reader>writer" -> fewest cycles seen from an unguarded late read to the overwriting.
        stall: name -> shortest stall seen on it; a branch issues what follows it if it is shorter.
        boards: name -> scoreboards seen on it, each of "", "R", "W" and "RW".
        paces: hold bits and stalls seen together, as `Y:S05`.
    """

    variable: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    raw: dict[str, int] = {}
    war: dict[str, int] = {}
    stall: dict[str, int] = {}
    boards: dict[str, tuple[str, ...]] = {}
    paces: tuple[str, ...] = ()


class Table(msgspec.Struct, frozen=True):
    """All that was learnt about one architecture's encoding.

    Attributes:
        arch: its name.
        tools: name to version of the programs it was learnt from.
        forms: key -> form.
        refused: key -> why the learner does not trust this form.
        timing: how the compiler times instructions.
    """

    arch: str
    tools: dict[str, str]
    forms: dict[str, Form]
    refused: dict[str, str] = {}
    timing: Timing = Timing()

    def form(self, instruction: Instruction) -> Form:
        """Find the form of an instruction.

        Raises:
            NoFormError: it was never seen, or is not trusted.
        """
        key = instruction.key
        if key in self.forms:
            return self.forms[key]
        if key in self.refused:
            raise NoFormError(f"the form `{key}` is refused: {self.refused[key]}.")
        alike = sorted(k for k in self.forms if k.split(" ")[1] == instruction.mnemonic)
        hint = f"; forms of {instruction.mnemonic} are: {'; '.join(alike[:4])}" if alike else ""
        raise NoFormError(f"no compiled code has the form `{key}` on {self.arch}{hint}.")

    def encode(self, instruction: Instruction) -> int:
        """Encode an instruction, control field cleared.

        Raises:
            NoFormError: the form was never seen, or is not trusted.
            UnreachableError: no word of the form has these operands.
        """
        word = self.form(instruction).encode(instruction.slots)
        if word is None:
            raise UnreachableError(
                f"no word of the form `{instruction.key}` holds these operands (a number too "
                "large, or a flag that the form has not)."
            )
        return word & ~CONTROL_MASK


def save(table: Table, path: Path) -> None:
    """Write a table; the same table gives the same bytes."""
    ordered = msgspec.structs.replace(
        table,
        forms={
            key: msgspec.structs.replace(form, bits=dict(sorted(form.bits.items())))
            for key, form in sorted(table.forms.items())
        },
        refused=dict(sorted(table.refused.items())),
        timing=msgspec.structs.replace(
            table.timing,
            raw=dict(sorted(table.timing.raw.items())),
            war=dict(sorted(table.timing.war.items())),
            stall=dict(sorted(table.timing.stall.items())),
            boards=dict(sorted(table.timing.boards.items())),
        ),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(msgspec.json.encode(ordered), 9, mtime=0))


def load(path: Path) -> Table:
    """Read a table.

    Raises:
        SassError: there is none, or it is damaged.
    """
    try:
        return msgspec.json.decode(gzip.decompress(path.read_bytes()), type=Table)
    except (OSError, EOFError, msgspec.DecodeError) as error:
        raise SassError(f"The encoding table {path} cannot be read: {error}.") from error


@functools.cache
def committed_table(arch: Architecture) -> Table:
    """The table of an architecture that comes with the package."""
    return load(Path(__file__).parent / "tables" / f"{arch.name}.json.gz")
