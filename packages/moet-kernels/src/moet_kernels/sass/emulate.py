"""Run a program in the emulator.

Functional, not timed: control fields have no effect (`moet_kernels.sass.hazards` checks those).
What would be undefined on hardware is an error here: addresses outside of the buffers, misaligned
ones, registers and memory that nothing wrote, races on shared memory, barriers that nobody passes.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from moet_kernels.sass import float_ops, integer_ops, matrix_ops, memory_ops
from moet_kernels.sass.errors import Fault, SassError
from moet_kernels.sass.machine import WARP, Buffer, Machine, Mask
from moet_kernels.sass.operands import NO_PREDICATE
from moet_kernels.sass.source import Program, Statement, targets

__all__ = ["OPCODES", "Launch", "Report", "Watch", "emulate"]

_OPERATIONS = {
    **integer_ops.OPERATIONS,
    **float_ops.OPERATIONS,
    **memory_ops.OPERATIONS,
    **matrix_ops.OPERATIONS,
}
# On the uniform datapath: the same operation, over warps instead of threads.
_UNIFORM = {f"U{name}": name for name in integer_ops.OPERATIONS} | {
    f"U{name}": name for name in float_ops.OPERATIONS
}
_IGNORED = frozenset({"NOP", "YIELD"})
_FLOW = frozenset({"BRA", "EXIT", "BSSY", "BSYNC", "BREAK", "WARPSYNC", "BAR"})
OPCODES = frozenset(_OPERATIONS) | frozenset(_UNIFORM) | _IGNORED | _FLOW
"""Every opcode that can be executed."""

_ON_UNIFORM_FILE = frozenset({"ULDC", "LDCU", "S2UR"})
_BATCH_THREADS = 1 << 14


class Launch(msgspec.Struct, frozen=True):
    """How a kernel is launched.

    Attributes:
        grid: blocks along x, y, z.
        threads: threads a block, a multiple of 32.
        parameters: the kernel parameters as they lie in constant bank 0.
        dynamic_shared: bytes of shared memory beyond the static ones.
        most_steps: instructions a batch of blocks may execute before it counts as hung.
    """

    grid: tuple[int, int, int]
    threads: int
    parameters: bytes
    dynamic_shared: int = 0
    most_steps: int = 1_000_000


class Report(msgspec.Struct, frozen=True):
    """What a run executed: opcode -> how often, counted once for all threads that took part."""

    steps: int
    opcodes: dict[str, int]


Watch = Callable[[Machine, Statement, Mask], None]
"""Called before every instruction, with the threads that are about to execute it."""


def emulate(
    program: Program, launch: Launch, buffers: Sequence[Buffer], watch: Watch | None = None
) -> Report:
    """Run all blocks of a launch; `buffers` change.

    Raises:
        EmulationError: the kernel does what hardware would leave undefined.
        SassError: the launch does not fit the program.
    """
    if launch.threads % WARP or not 0 < launch.threads <= 1024:
        raise SassError(f"{launch.threads} threads a block: wanted a multiple of 32 up to 1024.")
    if program.parameters and len(launch.parameters) != program.parameters:
        raise SassError(
            f"The kernel takes {program.parameters} bytes of parameters, not "
            f"{len(launch.parameters)}."
        )
    x, y, z = launch.grid
    order = np.stack(np.unravel_index(np.arange(x * y * z), (z, y, x)), axis=1)[:, ::-1]
    batch = max(_BATCH_THREADS // launch.threads, 1)
    steps = 0
    counts: dict[str, int] = {}
    for start in range(0, len(order), batch):
        machine = Machine(
            program.arch,
            _constants(program, launch),
            program.shared + launch.dynamic_shared,
            order[start : start + batch],
            launch.threads,
            list(buffers),
        )
        steps += _run(machine, program, launch.most_steps, counts, watch)
    return Report(steps, dict(sorted(counts.items())))


def _constants(program: Program, launch: Launch) -> np.ndarray:
    arch = program.arch
    size = arch.parameters + len(launch.parameters)
    bank = np.zeros(-(-size // 4) * 4, np.uint8)
    words = bank.view(np.uint32)
    words[arch.block_size // 4 : arch.block_size // 4 + 3] = (launch.threads, 1, 1)
    words[arch.block_size // 4 + 3 : arch.block_size // 4 + 6] = launch.grid
    bank[arch.parameters : size] = np.frombuffer(launch.parameters, np.uint8)
    return bank


def _run(
    machine: Machine, program: Program, most: int, counts: dict[str, int], watch: Watch | None
) -> int:
    steps = 0
    while machine.alive.any():
        ready = machine.alive & ~machine.waiting
        if not ready.any():
            _release(machine)
            continue
        counter = int(machine.pc[ready].min())
        if counter >= len(program.statements):
            raise machine.fail(Fault.OUT_OF_BOUNDS, "execution ran past the last instruction.")
        statement = program.statements[counter]
        machine.statement = statement
        steps += 1
        if steps > most:
            raise machine.fail(
                Fault.RUNAWAY, f"{most} instructions were executed; raise the limit."
            )
        opcode = statement.instruction.opcode
        counts[opcode] = counts.get(opcode, 0) + 1
        at = ready & (machine.pc == counter)
        if watch is not None:
            watch(machine, statement, at)
        _step(machine, statement, at)
    return steps


def _step(machine: Machine, statement: Statement, at: Mask) -> None:
    instruction = statement.instruction
    machine.pc[at] += 1
    mask = at
    if instruction.guard != NO_PREDICATE or instruction.guard_not:
        template = "UP" if instruction.guard_uniform else "P"
        guard = machine.predicate(machine.vector, template, instruction.guard, at)
        mask = at & (~guard if instruction.guard_not else guard)
        if not mask.any():
            return
    machine.mask = mask
    opcode = instruction.opcode
    if opcode in _IGNORED:
        return
    if opcode in _FLOW:
        _flow(machine, statement, mask)
    elif opcode in _ON_UNIFORM_FILE:
        _OPERATIONS[opcode](machine, machine.uniform, statement, machine.per_warp(mask))
    elif opcode in _OPERATIONS:
        _OPERATIONS[opcode](machine, machine.vector, statement, mask)
    elif opcode in _UNIFORM:
        operation = _OPERATIONS[_UNIFORM[opcode]]
        operation(machine, machine.uniform, statement, machine.per_warp(mask))
    else:
        raise machine.unsupported(opcode)


def _flow(machine: Machine, statement: Statement, mask: Mask) -> None:
    instruction = statement.instruction
    opcode = instruction.opcode
    if opcode == "BRA":
        for operand in instruction.operands:
            if operand.is_predicate:
                mask = mask & machine.read_predicate(machine.vector, operand, mask)
        machine.pc[mask] = targets(statement)[0] // 16
    elif opcode == "EXIT":
        machine.alive &= ~mask
    elif opcode == "BSSY":
        machine.convergence[instruction.operands[0].values[0]][mask] = _lanes(mask)[mask]
    elif opcode == "BREAK":
        raise machine.unsupported("BREAK")
    elif opcode == "BSYNC":
        _wait(machine, mask, machine.convergence[instruction.operands[0].values[0]])
    elif opcode == "WARPSYNC":
        if "ALL" in instruction.modifiers:
            _wait(machine, mask, np.full(machine.count, 0xFFFFFFFF, np.uint32))
        else:
            raise machine.unsupported(instruction.mnemonic)
    elif instruction.modifiers[:1] == ("SYNC",) and len(instruction.operands) == 1:
        _wait(machine, mask, np.zeros(machine.count, np.uint32))
    else:
        raise machine.unsupported(instruction.mnemonic)


def _lanes(mask: Mask) -> np.ndarray:
    """For each thread, the bits of the active lanes of its warp."""
    bits = np.packbits(mask.reshape(-1, WARP), axis=1, bitorder="little").view(np.uint32)
    return np.repeat(bits[:, 0], WARP)


def _wait(machine: Machine, mask: Mask, lanes: np.ndarray) -> None:
    machine.waiting |= mask
    machine.wait_mask[mask] = lanes[mask]
    warp_wide = machine.waiting & (machine.wait_mask != 0)
    if warp_wide.any():
        alive = _lanes(machine.alive)
        here = _lanes(warp_wide)
        met = warp_wide & ((machine.wait_mask & alive & ~here) == 0)
        machine.waiting &= ~met
    _pass_blocks(machine)


def _pass_blocks(machine: Machine) -> bool:
    """Let the blocks go on whose threads all wait at the barrier."""
    arrived = machine.waiting & (machine.wait_mask == 0)
    rows = (arrived | ~machine.alive).reshape(len(machine.blocks), -1)
    full = rows.all(axis=1) & arrived.reshape(len(machine.blocks), -1).any(axis=1)
    if full.any():
        machine.waiting &= ~(arrived & full[machine.block_of])
        machine.pass_barrier(np.flatnonzero(full))
    return bool(full.any())


def _release(machine: Machine) -> None:
    """No thread can run: exits may have completed a barrier, else the kernel hangs."""
    warp_wide = machine.waiting & (machine.wait_mask != 0)
    met = warp_wide & ((machine.wait_mask & _lanes(machine.alive) & ~_lanes(warp_wide)) == 0)
    machine.waiting &= ~met
    if _pass_blocks(machine) or met.any():
        return
    stuck = machine.alive & machine.waiting
    raise machine.fail(
        Fault.DEADLOCK,
        f"{int(stuck.sum())} threads wait for others that wait elsewhere or never come.",
        stuck,
    )
