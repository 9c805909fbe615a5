"""Fill in control fields: `safe` by rule of thumb, `tuned` from the learnt latencies.

Both keep the order of the instructions and take NOPs as places to wait at; control fields that the
source gives are kept in tuned mode. The result of either passes the hazard checker, or the call
fails and says where a NOP is missing.
"""

import msgspec

from moet_kernels.sass.assemble import form_of
from moet_kernels.sass.control import (
    LONGEST_HELD,
    LONGEST_STALL,
    NO_SCOREBOARD,
    SCOREBOARDS,
    Control,
)
from moet_kernels.sass.errors import Flaw, SourceError
from moet_kernels.sass.hazards import check_hazards
from moet_kernels.sass.roles import accesses
from moet_kernels.sass.source import Program, Statement
from moet_kernels.sass.table import Table, Timing
from moet_kernels.sass.timing import (
    Dependence,
    Kind,
    follow,
    name_of,
    needed_after_read,
    needed_alone,
)

__all__ = ["safe", "tuned"]

_READ_BOARD = 5  # all late reads share it; results use the others
_ROUNDS = 200


def safe(program: Program, table: Table) -> Program:
    """Control fields that need no thought: wait for everything, stall as long as possible."""
    statements = []
    for statement in program.statements:
        takes = _takes(statement, table)
        control = Control(
            LONGEST_STALL,
            hold=False,
            write=0 if "W" in takes else NO_SCOREBOARD,
            read=1 if "R" in takes else NO_SCOREBOARD,
            wait=0 if statement.instruction.opcode == "NOP" else 0b11,
        )
        statements.append(msgspec.structs.replace(statement, control=control))
    return _checked(msgspec.structs.replace(program, statements=tuple(statements)), table)


def _takes(statement: Statement, table: Table) -> str:
    """Which scoreboards an instruction must take: "R" for its sources, "W" for its results.

    A result that has arrived says that the sources were read, so one for the results alone will do
    where compiled code never takes both.
    """
    opcode, timing = statement.instruction.opcode, table.timing
    writes, _ = accesses(statement.instruction, form_of(statement, table))
    takes = "R" * (opcode in timing.late) + "W" * bool(opcode in timing.variable and writes)
    return takes if takes in timing.boards.get(name_of(statement.instruction), ()) else takes[-1:]


def tuned(program: Program, table: Table) -> Program:
    """The shortest stalls and fewest waits that the learnt latencies allow in this order."""
    fixed = {i for i, s in enumerate(program.statements) if s.control is not None}
    controls = _boards(program, table)
    for index in fixed:
        given = program.statements[index].control
        assert given is not None
        controls[index] = given
    for _ in range(_ROUNDS):
        trial = _with(program, controls)
        changed = False
        for found in sorted(follow(trial, table, table.timing), key=_order):
            changed |= _mend(found, controls, fixed, table.timing)
        if not changed:
            break
    _drop_needless_waits(controls, fixed, program, table)
    return _checked(_with(program, controls), table)


def _order(found: Dependence) -> tuple[int, int, str, str, str]:
    """Sort by consumer; the rest makes ties the same in every process, as a set's order is not."""
    return found.second, found.first, found.kind, found.register, found.key


def _drop_needless_waits(
    controls: list[Control], fixed: set[int], program: Program, table: Table
) -> None:
    """Take waits back that an earlier wait on every path makes needless."""
    waits = [
        (index, board)
        for index, control in enumerate(controls)
        for board in range(SCOREBOARDS)
        if index not in fixed and control.wait >> board & 1
    ]
    if waits and not check_hazards(_with(program, controls), table):
        _drop(waits, controls, program, table)


def _drop(
    waits: list[tuple[int, int]], controls: list[Control], program: Program, table: Table
) -> None:
    """Drop waits one after the other, each if it is needless then; all at once where all are.

    That is the same, because what lacks several waits has every hazard of what lacks one.
    """
    kept = [(index, controls[index]) for index, _ in waits]
    for index, board in waits:
        control = controls[index]
        controls[index] = msgspec.structs.replace(control, wait=control.wait & ~(1 << board))
    if not check_hazards(_with(program, controls), table):
        return
    for index, control in kept:
        controls[index] = control
    half = len(waits) // 2
    for some in (waits[:half], waits[half:]) if half else ():
        _drop(some, controls, program, table)


def _with(program: Program, controls: list[Control]) -> Program:
    statements = tuple(
        msgspec.structs.replace(statement, control=control)
        for statement, control in zip(program.statements, controls, strict=True)
    )
    return msgspec.structs.replace(program, statements=statements)


def _boards(program: Program, table: Table) -> list[Control]:
    """Give scoreboards out; results that are first used by the same instruction share one."""
    uses = [accesses(s.instruction, form_of(s, table)) for s in program.statements]
    controls = []
    shared: dict[int, int] = {}
    following = 0
    for index, statement in enumerate(program.statements):
        takes = _takes(statement, table)
        write = read = NO_SCOREBOARD
        if "W" in takes:
            first = _first_use(index, uses[index][0], uses)
            if first not in shared:
                shared[first] = following
                following = (following + 1) % _READ_BOARD
            write = shared[first]
        if "R" in takes:
            read = _READ_BOARD
        stall = max(table.timing.stall.get(name_of(statement.instruction), 1), 1)
        controls.append(Control(stall, hold=stall <= LONGEST_HELD, write=write, read=read))
    return controls


def _first_use(index: int, writes: frozenset, uses: list) -> int:
    """The next instruction, in the order of the text and then from the start, that reads these."""
    count = len(uses)
    for step in range(1, count):
        at = (index + step) % count
        if any(register in writes for register, _ in uses[at][1]):
            return at
    return -1 - index


def _mend(
    found: Dependence,
    controls: list[Control],
    fixed: set[int],
    timing: Timing,
) -> bool:
    """Cover one dependence; whether that changed a control field."""
    if found.kind in (Kind.FIXED, Kind.SIGNAL):
        missing = needed_alone(timing, found.key) - found.cycles
        return missing > 0 and _stall(found, missing, controls, fixed)
    if found.kind == Kind.SOURCE:
        after = needed_after_read(timing, found.key)
        if after is not None and found.cycles >= after:
            return False
        first = controls[found.first]
        board = first.write if first.read == NO_SCOREBOARD else first.read
    else:
        board = controls[found.first].write
    if found.second in fixed or board == NO_SCOREBOARD:
        return False
    waiting = controls[found.second]
    if waiting.wait >> board & 1:
        return False
    controls[found.second] = msgspec.structs.replace(waiting, wait=waiting.wait | 1 << board)
    return True


def _stall(found: Dependence, missing: int, controls: list[Control], fixed: set[int]) -> bool:
    """Lengthen stalls from just before the consumer backwards to the producer."""
    first = found.first if found.first < found.second else max(found.second - 3, 0)
    places = range(found.second - 1, first - 1, -1) if found.second > first else []
    for index in [*places, found.first]:
        if index in fixed:
            continue
        stall = controls[index].stall
        longer = min(stall + missing, LONGEST_STALL)
        if longer > stall:
            controls[index] = msgspec.structs.replace(
                controls[index], stall=longer, hold=longer <= LONGEST_HELD
            )
            return True
    return False


def _checked(program: Program, table: Table) -> Program:
    for hazard in check_hazards(program, table):
        statement: Statement = program.statements[hazard.address // 16]
        raise SourceError(
            Flaw.CONTROL,
            statement.line,
            statement.column,
            f"`{statement.text}` cannot wait long enough for {hazard.register} "
            f"({hazard.kind}): {hazard.message} Put NOPs before it.",
        )
    return program
