"""The control field of an instruction word: when it issues and which scoreboards it uses.

Bits 105 to 121 of the 128-bit word, from the lowest:

    stall 4 | hold 1 | write scoreboard 3 | read scoreboard 3 | wait mask 6

`nvdisasm` does not print it, but refuses values that no compiler emits; that, and statistics over
compiled code, is how the layout was found. In text it is `[B01----:R2:W3:Y:S05]`: wait for
scoreboards 0 and 1, release 2 once the sources are read and 3 once the results are written, stall
5 cycles. `Y` is a clear hold bit, `-` a set one; a set one allows stalls of 1 to 11 only.
"""

import re

import msgspec

from moet_kernels.sass.errors import SassError

__all__ = [
    "CONTROL_MASK",
    "LONGEST_HELD",
    "LONGEST_STALL",
    "NO_SCOREBOARD",
    "SCOREBOARDS",
    "Control",
    "parse_control",
]

SCOREBOARDS = 6
# The longest that compiled code of both architectures has, with no gap below. An H200 runs longer
# ones; the schedulers keep to what has precedent.
LONGEST_STALL = 13
LONGEST_HELD = 9
NO_SCOREBOARD = 7
_SHIFT = 105
CONTROL_MASK = ((1 << 17) - 1) << _SHIFT
_TEXT = re.compile(r"B([-\d]{6}):R([-\d]):W([-\d]):([-Y]):S(\d\d)")


class Control(msgspec.Struct, frozen=True):
    """When an instruction issues and which scoreboards it uses.

    Attributes:
        stall: cycles until the next instruction may issue, 0..15.
        hold: the bit that allows stalls of 1 to 11 only.
        write: scoreboard released when the results are written, NO_SCOREBOARD for none.
        read: scoreboard released when the sources are read, NO_SCOREBOARD for none.
        wait: bit b set: wait until scoreboard b is free.
    """

    stall: int = 1
    hold: bool = True
    write: int = NO_SCOREBOARD
    read: int = NO_SCOREBOARD
    wait: int = 0

    def check(self) -> None:
        """Raise SassError unless the hardware's field can hold this."""
        if not 0 <= self.stall <= 15:
            raise SassError(f"stall {self.stall}: wanted 0 to 15.")
        if self.hold and not 1 <= self.stall <= 11:
            raise SassError(f"stall {self.stall} with '-': wanted 1 to 11; longer ones need 'Y'.")
        for name, value in (("write", self.write), ("read", self.read)):
            if value != NO_SCOREBOARD and not 0 <= value < SCOREBOARDS:
                raise SassError(f"{name} scoreboard {value}: wanted 0 to 5, or '-'.")
        if not 0 <= self.wait < 1 << SCOREBOARDS:
            raise SassError(f"wait mask {self.wait:#x}: wanted six bits.")

    @property
    def bits(self) -> int:
        """The field at its place in the instruction word."""
        field = self.stall | self.hold << 4 | self.write << 5 | self.read << 8 | self.wait << 11
        return field << _SHIFT

    @property
    def pace(self) -> str:
        """The hold bit and the stall, as in the text: `Y:S05`."""
        return f"{'-' if self.hold else 'Y'}:S{self.stall:02}"

    @property
    def boards(self) -> str:
        """Which scoreboards it takes: "", "R", "W" or "RW"."""
        read = "R" * (self.read != NO_SCOREBOARD)
        return read + "W" * (self.write != NO_SCOREBOARD)

    @property
    def text(self) -> str:
        """The field as source text, without brackets."""
        wait = "".join(str(b) if self.wait >> b & 1 else "-" for b in range(SCOREBOARDS))
        read, write = (
            "-" if board == NO_SCOREBOARD else str(board) for board in (self.read, self.write)
        )
        return f"B{wait}:R{read}:W{write}:{self.pace}"

    @classmethod
    def of(cls, word: int) -> "Control":
        """Read the field of an instruction word."""
        field = word >> _SHIFT
        return cls(
            field & 15, bool(field >> 4 & 1), field >> 5 & 7, field >> 8 & 7, field >> 11 & 63
        )


def parse_control(text: str) -> Control:
    """Read a control field from source text, without brackets.

    Raises:
        SassError: the text is none, or names a value that the field cannot hold.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise SassError(f"{text!r} is no control field: wanted the like of B0-----:R-:W1:Y:S05.")
    wait_text, read, write, hold, stall = match.groups()
    wait = 0
    for board, char in enumerate(wait_text):
        if char not in ("-", str(board)):
            raise SassError(f"{text!r}: place {board} of the wait mask must be '{board}' or '-'.")
        wait |= (char != "-") << board
    writes, reads = (NO_SCOREBOARD if char == "-" else int(char) for char in (write, read))
    control = Control(int(stall), hold == "-", writes, reads, wait)
    control.check()
    return control
