"""What compiled code never does with a form that it has: flags, defaults and control fields.

An encoding may have bits that `nvdisasm` understands and the compiler never sets: a reuse flag on
an operand that is not cached, a second predicate that is always PT, a scoreboard on an instruction
that never takes one. Nothing says that the hardware accepts them, so the audit reports them.

The *marks* of an instruction are what is compared: whether each register and predicate is the zero
register or the true predicate, and each flag. Which register it is, and which number, is free.
"""

from collections.abc import Iterable, Iterator

from moet_kernels.sass.arch import Architecture, architecture
from moet_kernels.sass.control import NO_SCOREBOARD, SCOREBOARDS, Control
from moet_kernels.sass.operands import NO_PREDICATE, NO_REGISTER, Instruction
from moet_kernels.sass.roles import register_slots
from moet_kernels.sass.table import Table
from moet_kernels.sass.timing import name_of

__all__ = ["seen_marks", "unprecedented"]

_FLAGS: tuple[str, ...] = ("a minus sign", "absolute bars", "a tilde", ".reuse")


def marks(instruction: Instruction, arch: Architecture) -> list[tuple[str, bool]]:
    """List the marks of an instruction with what each is; the guard has none."""
    files = dict(register_slots(instruction.key))
    zero = {"R": NO_REGISTER, "UR": arch.uniform_zero, "P": NO_PREDICATE, "UP": NO_PREDICATE}
    found = []
    slot = 2
    for place, operand in enumerate(instruction.operands, 1):
        for value in operand.values:
            if slot in files:
                file = files[slot]
                name = f"{file}T" if file in ("P", "UP") else f"{file}Z"
                found.append((f"{name} in operand {place}", value == zero[file]))
            slot += 1
        flags = operand.slots[len(operand.values) :]
        if operand.is_value:
            names = _FLAGS
        else:
            names = ("a negation",) if operand.is_predicate else (".reuse",) * len(flags)
        found += [
            (f"{name} on operand {place}", bool(flag))
            for name, flag in zip(names, flags, strict=True)
        ]
        slot += len(flags)
    return found


def seen_marks(instructions: Iterable[Instruction], arch: Architecture) -> tuple[int, int]:
    """Which marks the instructions of one form have: (bits seen set, bits seen clear)."""
    with_it = without = 0
    for instruction in instructions:
        for bit, (_, value) in enumerate(marks(instruction, arch)):
            with_it |= value << bit
            without |= (not value) << bit
    return with_it, without


def unprecedented(instruction: Instruction, control: Control, table: Table) -> Iterator[str]:
    """Say what of an instruction and its control field no compiled instruction has.

    Raises:
        NoFormError: the instruction's form itself was never seen.
    """
    with_it, without = table.form(instruction).marks
    for bit, (name, value) in enumerate(marks(instruction, architecture(table.arch))):
        if not (with_it if value else without) >> bit & 1:
            yield f"compiled code {'never' if value else 'always'} has {name} of this form."
    name = name_of(instruction)
    seen = table.timing.boards.get(name, ())
    if control.boards not in seen:
        choices = ", ".join(repr(boards) for boards in seen) or "nothing"
        yield f"it takes scoreboards {control.boards!r}; compiled code has {choices} on {name}."
    if control.pace not in table.timing.paces:
        yield f"{control.pace}; no compiled instruction has this stall with this hold bit."
    for use, board in (("write", control.write), ("read", control.read)):
        if SCOREBOARDS <= board < NO_SCOREBOARD:
            yield f"{use} scoreboard {board}; there are {SCOREBOARDS}."
