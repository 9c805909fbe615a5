"""Seeded faults: control fields made wrong on purpose, one at a time."""

from collections.abc import Iterator

import msgspec

from moet_kernels.sass.control import LONGEST_HELD, NO_SCOREBOARD, SCOREBOARDS, Control
from moet_kernels.sass.source import Program

__all__ = ["SeededFault", "seeded_faults", "with_fault"]


class SeededFault(msgspec.Struct, frozen=True):
    """A control field replaced.

    Attributes:
        kind: what was done.
        index: which instruction.
        control: its new control field.
    """

    kind: str
    index: int
    control: Control


def seeded_faults(program: Program) -> Iterator[SeededFault]:
    """Every single removed wait, every dropped scoreboard, and three shortenings of every stall."""
    for index, statement in enumerate(program.statements):
        control = statement.control
        assert control is not None
        for board in range(SCOREBOARDS):
            if control.wait >> board & 1:
                fewer = msgspec.structs.replace(control, wait=control.wait & ~(1 << board))
                yield SeededFault("wait removed", index, fewer)
        if control.write != NO_SCOREBOARD:
            dropped = msgspec.structs.replace(control, write=NO_SCOREBOARD)
            yield SeededFault("write scoreboard dropped", index, dropped)
        if control.read != NO_SCOREBOARD:
            dropped = msgspec.structs.replace(control, read=NO_SCOREBOARD)
            yield SeededFault("read scoreboard dropped", index, dropped)
        for stall in sorted({1, control.stall // 2, control.stall - 1}):
            if 1 <= stall < control.stall:
                shorter = msgspec.structs.replace(control, stall=stall, hold=stall <= LONGEST_HELD)
                yield SeededFault("stall shortened", index, shorter)


def with_fault(program: Program, fault: SeededFault) -> Program:
    """The program with one control field replaced."""
    statements = list(program.statements)
    statements[fault.index] = msgspec.structs.replace(
        statements[fault.index], control=fault.control
    )
    return msgspec.structs.replace(program, statements=tuple(statements))
