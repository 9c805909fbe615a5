"""The hazard checker: dependences that a program's control fields leave open."""

from collections.abc import Iterator

import msgspec

from moet_kernels.sass.source import Program
from moet_kernels.sass.table import Table
from moet_kernels.sass.timing import Dependence, Kind, follow, name_of, needed, needed_after_read

__all__ = ["Hazard", "check_hazards"]


class Hazard(msgspec.Struct, frozen=True):
    """A dependence that may be violated.

    Attributes:
        kind: which rule.
        address: of the later instruction.
        instruction: its text.
        because_of: address of the earlier one.
        register: what both touch.
        message: what is missing, a complete sentence.
    """

    kind: str
    address: int
    instruction: str
    because_of: int
    register: str
    message: str


def check_hazards(program: Program, table: Table) -> list[Hazard]:
    """Check every path through a program; an empty list means that no rule is broken.

    Every statement needs a control field. Rules: a result of fixed latency is used no sooner than
    compiled code ever used one; a result on a scoreboard is waited for before its use or its
    overwriting; a source that is read late is waited for before it is overwritten; a scoreboard is
    waited for no sooner after the instruction that takes it than compiled code ever did; no
    stall is shorter than any that compiled code has on that instruction.
    """
    hazards = list(_short_stalls(program, table))
    for found in follow(program, table, table.timing):
        message = _violation(found, table)
        if message:
            later = program.statements[found.second]
            hazards.append(
                Hazard(
                    found.kind,
                    later.address,
                    later.text,
                    program.statements[found.first].address,
                    found.register,
                    message,
                )
            )
    return sorted(hazards, key=lambda hazard: (hazard.address, hazard.because_of, hazard.register))


def _short_stalls(program: Program, table: Table) -> Iterator[Hazard]:
    for statement in program.statements:
        assert statement.control is not None
        least = table.timing.stall.get(name_of(statement.instruction), 1)
        if statement.control.stall < least:
            yield Hazard(
                "short stall",
                statement.address,
                statement.text,
                statement.address,
                "",
                f"stall {statement.control.stall}; compiled code has {least} or more here.",
            )


def _violation(found: Dependence, table: Table) -> str | None:
    if found.kind in (Kind.FIXED, Kind.SIGNAL):
        cycles = needed(table.timing, found.key)
        if found.cycles < cycles:
            return f"{found.cycles} cycles after the producer; compiled code leaves {cycles}."
        return None
    if found.kind == Kind.SOURCE:
        after = needed_after_read(table.timing, found.key)
        if after is None:
            return "no wait for the read scoreboard of the reader, and no precedent for that."
        if found.cycles < after:
            return f"{found.cycles} cycles after the late reader; compiled code leaves {after}."
        return None
    if found.kind == Kind.OVERWRITE:
        if found.key in table.timing.war:
            return None
        return "no wait for the scoreboard of the pending result that this overwrites."
    return "no wait for the scoreboard of the result that this reads."
