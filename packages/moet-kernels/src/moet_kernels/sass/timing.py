"""Dependences between instructions and the cycles they need, learnt from compiled code.

Results of fixed latency are ready some cycles after the instruction issued; the others signal a
scoreboard. NVIDIA documents neither. The compiler knows both, so for every pair (producer,
consumer) the fewest cycles that it ever left between them is evidence that this many are enough.
It is an upper bound of what the hardware needs, never a claim about less.

`follow` walks the control-flow graph and reports every dependence with the fewest cycles on any
path. Cycles are the sum of stalls. A wait adds more: where one lies between the two, the compiler
may have left fewer cycles than the result needs, so learning keeps those apart. A taken branch
counts for `BRANCH_CYCLES` more than its stall.

Three orders besides registers hold, each found on an H200. Memory instructions after a barrier
must not issue before it has taken effect: `BAR` produces, and they consume, the pseudo-register
`MEM`. A queue of memory instructions reads its sources in order, so whatever says that a later one
has read says so of the earlier ones. And no number of cycles is enough for a source that is
read late: the queue may be full.
"""

import functools
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from moet_kernels.sass.control import LONGEST_STALL, NO_SCOREBOARD
from moet_kernels.sass.operands import NO_PREDICATE, Instruction
from moet_kernels.sass.roles import Access, accesses
from moet_kernels.sass.source import Program, targets
from moet_kernels.sass.table import Form, NoFormError, Table, Timing

__all__ = [
    "Dependence",
    "Kind",
    "follow",
    "learn_timing",
    "name_of",
    "needed",
    "needed_after_read",
    "needed_alone",
]

BRANCH_CYCLES = 8
_HORIZON = 64  # cycles after which every fixed latency is over
_NEVER = 1 << 6  # a scoreboard bit that nothing waits for
_ENDS = frozenset({"EXIT", "RET", "BRX", "BRXU", "JMX", "BPT", "KILL", "CALL"})
_MATRIX = re.compile(r"[HIQOD]MMA")
# Instructions of the memory queue, which reads their sources in order.
_QUEUED = re.compile(r"(LDG|LDS|LDL|LDSM|LDGSTS|STG|STS|STL|STSM|ATOMG|ATOMS|REDG)$")
_ORDER: Access = ("MEM", 0)
_WAITED = "~"  # ends the key of a dependence with a wait between the two
_HELD = "held"  # operand in the key of a source whose reader took a scoreboard for it
# Units that give results back in order: one scoreboard can stand for all before it.
_SPECIAL_UNIT = frozenset(["MUFU", "F2I", "I2F", "F2F", "FRND", "FCHK", "POPC", "FLO", "BREV"])
_UNKNOWN = Form("0", (), {}, ())


class Kind:
    """What a dependence is about."""

    FIXED = "fixed latency"
    RESULT = "result on a scoreboard"
    OVERWRITE = "overwritten before the result arrives"
    SOURCE = "source overwritten before it is read"
    SIGNAL = "scoreboard waited for before it is taken"


class Dependence(msgspec.Struct, frozen=True):
    """Two instructions that touch one register.

    Attributes:
        kind: see `Kind`.
        first: index of the earlier instruction.
        second: index of the later one.
        register: what both touch, `R4`.
        key: "name/file>name:operand", by which its cycles are learnt; "name/SB>wait:" for
            a scoreboard, which is taken some cycles after its instruction issued. A "~" at
            the end says that a wait lies between the two.
        cycles: fewest cycles between the two on any path.
    """

    kind: str
    first: int
    second: int
    register: str
    key: str
    cycles: int


class _State:
    """What is under way when an instruction issues; all ages are the fewest over all paths."""

    def __init__(self) -> None:
        self.results: dict[tuple[Access, int], int] = {}  # (register, producer) -> age
        self.waited: dict[tuple[Access, int], int] = {}  # the same, with a wait since
        self.boards: dict[tuple[Access, int], int] = {}  # (register, producer) -> scoreboard bits
        self.reads: dict[tuple[Access, int, int], int] = {}  # (register, reader, bits) -> age
        self.taken: dict[tuple[int, int], int] = {}  # (scoreboard bit, taker) -> age

    def copy(self, cycles: int = 0) -> "_State":
        other = _State()
        other.results = {k: v + cycles for k, v in self.results.items()}
        other.waited = {k: v + cycles for k, v in self.waited.items()}
        other.boards = dict(self.boards)
        other.reads = {k: v + cycles for k, v in self.reads.items()}
        other.taken = {k: v + cycles for k, v in self.taken.items()}
        return other

    def merge(self, other: "_State") -> bool:
        """Take the worse of both; whether that changed anything."""
        changed = False
        pairs: tuple[tuple[dict[Any, int], dict[Any, int]], ...] = (
            (self.results, other.results),
            (self.waited, other.waited),
            (self.reads, other.reads),
            (self.taken, other.taken),
        )
        for mine, theirs in pairs:
            for key, age in theirs.items():
                if mine.get(key, _HORIZON + 1) > age:
                    mine[key] = age
                    changed = True
        for key, bits in other.boards.items():
            if self.boards.get(key, 0) | bits != self.boards.get(key, 0):
                self.boards[key] = self.boards.get(key, 0) | bits
                changed = True
        return changed


@functools.lru_cache(maxsize=4096)
def name_of(instruction: Instruction) -> str:
    """The name under which an instruction is timed: opcode and what changes its pipeline."""
    parts = [instruction.opcode]
    for modifier in instruction.modifiers:
        if modifier in ("WIDE", "HI") or (modifier.isdigit() and _MATRIX.match(parts[0])):
            parts.append(modifier)
    return ".".join(parts)


def _unit(opcode: str) -> str:
    if opcode.startswith("D"):
        return "double"
    return "special" if opcode in _SPECIAL_UNIT else opcode


def follow(program: Program, table: Table, timing: Timing) -> set[Dependence]:
    """Find every dependence that is not covered by a wait, with its fewest cycles.

    Scoreboard dependences are reported only where the wait is missing, the others always. What a
    called function does is not followed, nor are indirect branches.
    """
    walker = _Walker(program, table, timing)
    return walker.run()


class _Walker:
    def __init__(self, program: Program, table: Table, timing: Timing) -> None:
        self.program = program
        self.variable, self.late = frozenset(timing.variable), frozenset(timing.late)
        self.uses = []
        for statement in program.statements:
            try:
                form = table.form(statement.instruction)
            except NoFormError:
                form = _UNKNOWN
            writes, reads = accesses(statement.instruction, form)
            if statement.instruction.opcode == "BAR":
                writes = writes | {_ORDER}
            elif _QUEUED.match(statement.instruction.opcode):
                reads = (*reads, (_ORDER, ""))
            self.uses.append((writes, reads))
        self.found: dict[tuple[str, int, int, str, str], int] = {}
        self.leaders = self._leaders()

    def _leaders(self) -> set[int]:
        leaders = {0}
        for i, statement in enumerate(self.program.statements):
            goes = targets(statement)
            leaders |= {target // 16 for target in goes}
            if goes or statement.instruction.opcode in _ENDS:
                leaders.add(i + 1)
        return {i for i in leaders if i < len(self.program.statements)}

    def run(self) -> set[Dependence]:
        entry: dict[int, _State] = {0: _State()}
        work = [0]
        while work:
            start = work.pop()
            for target, state in self._block(start, entry[start].copy()):
                if target not in entry:
                    entry[target] = state
                elif not entry[target].merge(state):
                    continue
                if target not in work:
                    work.append(target)
        return {
            Dependence(kind, first, second, register, key, cycles)
            for (kind, first, second, register, key), cycles in self.found.items()
        }

    def _block(self, start: int, state: _State) -> list[tuple[int, _State]]:
        statements = self.program.statements
        index = start
        while True:
            self._issue(index, state)
            statement = statements[index]
            opcode = statement.instruction.opcode
            guarded = statement.instruction.guard != NO_PREDICATE
            leaving = []
            if opcode == "BRA":
                target = targets(statement)[0] // 16
                if target < len(statements):
                    leaving.append((target, state.copy(BRANCH_CYCLES)))
                conditional = guarded or len(statement.instruction.operands) > 1
                if conditional and index + 1 < len(statements):
                    leaving.append((index + 1, state))
                return leaving
            if opcode in _ENDS and not guarded:
                return leaving
            index += 1
            if index >= len(statements):
                return leaving
            if index in self.leaders:
                return [(index, state)]

    def _issue(self, index: int, state: _State) -> None:
        statement = self.program.statements[index]
        control = statement.control
        assert control is not None
        name = name_of(statement.instruction)
        if control.wait:
            for (bit, taker), age in state.taken.items():
                if bit & control.wait:
                    self._note(Kind.SIGNAL, taker, index, ("SB", bit), "wait", "", age)
            state.taken = {k: v for k, v in state.taken.items() if not k[0] & control.wait}
            state.boards = {k: v & ~control.wait for k, v in state.boards.items()}
            state.boards = {k: v for k, v in state.boards.items() if v}
            state.reads = {k: v for k, v in state.reads.items() if not k[2] & control.wait}
            for key, age in state.results.items():
                state.waited[key] = min(age, state.waited.get(key, age))
            state.results = {}
        writes, reads = self.uses[index]
        self._see_reads(index, name, reads, state)
        self._see_writes(index, name, writes, state)
        if statement.instruction.guard == NO_PREDICATE and not statement.instruction.guard_not:
            kept: dict[Any, int]
            for kept in (state.results, state.waited, state.boards):
                for key in [key for key in kept if key[0] in writes]:
                    del kept[key]
        board = 0 if control.write == NO_SCOREBOARD else 1 << control.write
        opcode = statement.instruction.opcode
        variable = opcode in self.variable
        if board and variable:
            for key, bits in state.boards.items():
                earlier = self.program.statements[key[1]].instruction.opcode
                if bits & _NEVER and _unit(earlier) == _unit(opcode):
                    state.boards[key] = bits & ~_NEVER | board
        for register in writes:
            if (board or variable) and register != _ORDER:
                state.boards[register, index] = board or _NEVER
            else:
                state.results[register, index] = 0
        held = 0 if control.read == NO_SCOREBOARD else 1 << control.read
        bits = board | held
        if bits and _QUEUED.match(opcode):
            self._read_in_order(bits, state)
        if opcode in self.late:
            for register, _ in reads:
                if register[0] in ("R", "UR"):
                    state.reads[register, index, bits] = 0
        for taken in (control.write, control.read):
            if taken != NO_SCOREBOARD:
                state.taken[1 << taken, index] = 0
        cycles = max(control.stall, 1)
        state.taken = {k: v + cycles for k, v in state.taken.items() if v + cycles < _HORIZON}
        state.results = {k: v + cycles for k, v in state.results.items() if v + cycles < _HORIZON}
        state.waited = {k: v + cycles for k, v in state.waited.items() if v + cycles < _HORIZON}
        state.reads = {k: min(v + cycles, _HORIZON) for k, v in state.reads.items()}

    def _see_reads(
        self, index: int, name: str, reads: Iterable[tuple[Access, str]], state: _State
    ) -> None:
        by_register: dict[Access, list[str]] = {}
        for register, operand in reads:
            by_register.setdefault(register, []).append(operand)
        for (register, producer), _ in state.boards.items():
            if register in by_register:
                self._note(Kind.RESULT, producer, index, register, name, "", 0)
        for ages, waited in ((state.results, ""), (state.waited, _WAITED)):
            for (register, producer), age in ages.items():
                for operand in by_register.get(register, ()):
                    self._note(Kind.FIXED, producer, index, register, name, operand + waited, age)

    def _see_writes(self, index: int, name: str, writes: frozenset[Access], state: _State) -> None:
        for register, producer in state.boards:
            if register in writes:
                self._note(Kind.OVERWRITE, producer, index, register, name, "", 0)
        for (register, reader, _), age in state.reads.items():
            if register in writes and reader != index:
                control = self.program.statements[reader].control
                assert control is not None
                held = "" if control.read == NO_SCOREBOARD else _HELD
                self._note(Kind.SOURCE, reader, index, register, name, held, age)

    def _read_in_order(self, bits: int, state: _State) -> None:
        """Let scoreboards of one memory instruction stand for the reads of those before it."""
        for (register, reader, before), age in list(state.reads.items()):
            opcode = self.program.statements[reader].instruction.opcode
            if _QUEUED.match(opcode) and before | bits != before:
                del state.reads[register, reader, before]
                state.reads[register, reader, before | bits] = age

    def _note(
        self,
        kind: str,
        first: int,
        second: int,
        register: Access,
        name: str,
        operand: str,
        cycles: int,
    ) -> None:
        earlier = name_of(self.program.statements[first].instruction)
        key = f"{earlier}/{register[0]}>{name}:{operand}"
        number = register[1].bit_length() - 1 if register[0] == "SB" else register[1]
        place = (kind, first, second, f"{register[0]}{number}", key)
        self.found[place] = min(cycles, self.found.get(place, cycles))


def learn_timing(programs: Iterable[Program], table: Table) -> Timing:
    """Learn from compiled programs which results need scoreboards and how long the others take."""
    programs = list(programs)
    variable, late, stall = set(), set(), dict[str, int]()
    boards: dict[str, set[str]] = {}
    paces: set[str] = set()
    for program in programs:
        for statement in program.statements:
            assert statement.control is not None
            opcode = statement.instruction.opcode
            if statement.control.write != NO_SCOREBOARD and opcode != "BAR":
                variable.add(opcode)
            if statement.control.read != NO_SCOREBOARD:
                late.add(opcode)
            name = name_of(statement.instruction)
            stall[name] = min(statement.control.stall, stall.get(name, LONGEST_STALL))
            boards.setdefault(name, set()).add(statement.control.boards)
            paces.add(statement.control.pace)
    # A result of these is of fixed latency unless the instruction says otherwise.
    timing = Timing(tuple(sorted(variable)), tuple(sorted(late)))
    raw: dict[str, int] = {}
    war: dict[str, int] = {}
    for program in programs:
        for found in follow(program, table, timing):
            kept = {Kind.FIXED: raw, Kind.SIGNAL: raw, Kind.SOURCE: war}.get(found.kind)
            if kept is not None:
                kept[found.key] = min(found.cycles, kept.get(found.key, found.cycles))
    taken = {name: tuple(sorted(found)) for name, found in boards.items()}
    return Timing(timing.variable, timing.late, raw, war, stall, taken, tuple(sorted(paces)))


def needed(timing: Timing, key: str) -> int:
    """Cycles to leave for a result of fixed latency.

    With a wait between the two, what the compiler left with one between them, if it ever did. For
    a pair that the compiler never showed: the most it left for another operand of the same pair,
    or what a matrix or double instruction needs for any consumer it showed, or `LONGEST_STALL`.
    Pairs that it showed with slack only count for no more than that, unless the producer is a
    matrix or double instruction: no other fixed latency was ever seen to need more.
    """
    if key.endswith(_WAITED):
        with_wait = timing.raw.get(key, _HORIZON)
        return min(with_wait, needed(timing, key.removesuffix(_WAITED)))
    cycles = timing.raw.get(key) or _needed_unseen(_frozen(timing), key)
    return cycles if _is_long(key) else min(cycles, LONGEST_STALL)


def needed_alone(timing: Timing, key: str) -> int:
    """Cycles to leave where no wait may be counted on to add any."""
    return needed(timing, key.removesuffix(_WAITED))


def needed_after_read(timing: Timing, key: str) -> int | None:
    """Cycles from a late read to an overwriting that does not wait for it; None: always wait."""
    return timing.war.get(key)


_caches: dict[int, tuple[Timing, dict[str, int]]] = {}


def _frozen(timing: Timing) -> dict[str, int]:
    """Most cycles by pair of names, and by long producer."""
    cached = _caches.get(id(timing))
    if cached is not None and cached[0] is timing:
        return cached[1]
    most: dict[str, int] = {}
    for key, cycles in timing.raw.items():
        if key.endswith(_WAITED):
            continue
        names = [_pair(key), _producer(key)] if _is_long(key) else [_pair(key)]
        for name in names:
            most[name] = max(cycles, most.get(name, 0))
    _caches[id(timing)] = (timing, most)
    return most


def _needed_unseen(most: dict[str, int], key: str) -> int:
    known = most.get(_pair(key), most.get(_producer(key), 0) if _is_long(key) else 0)
    return known or (_HORIZON if _is_long(key) else LONGEST_STALL)


def _pair(key: str) -> str:
    """Producer and consumer, the guard kept apart from the other operands."""
    names, operand = key.rsplit(":", 1)
    return f"pair {names}{'@' if operand == '@' else ''}"


def _producer(key: str) -> str:
    return f"producer {key.split('/')[0]}"


def _is_long(key: str) -> bool:
    """Whether the producer is a matrix or double instruction."""
    opcode = key.split("/")[0].split(".")[0]
    return bool(_MATRIX.match(opcode)) or (opcode.startswith("D") and opcode != "DEPBAR")
