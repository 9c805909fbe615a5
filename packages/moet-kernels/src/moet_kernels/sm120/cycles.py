"""A cycle model: how long a kernel takes, predicted from its instructions and control fields.

The emulator gives what each warp of a block executes and which bytes it touches; the model then
issues it on one processor, cycle by cycle: in order, one instruction a scheduler and cycle, stalls
and scoreboards as the control fields say, pipes and memory as a `Processor` describes them. Blocks
are taken up as others end. Its results are predictions, made from public figures of a GPU and never
fitted to a measurement; `bench/kernels/cycles.py` says how far off they are.
"""

import functools
import heapq
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from moet_kernels.sass.emulate import Launch, emulate
from moet_kernels.sass.machine import WARP, Buffer, Machine, Mask
from moet_kernels.sass.memory_ops import _addresses
from moet_kernels.sass.source import Program, Statement

__all__ = ["Op", "Prediction", "Processor", "predict", "trace"]

_SECTOR = 32
_BRANCH_CYCLES = 8
_MATRIX = re.compile(r"[HIQO]MMA")
_ALU = re.compile(
    r"LOP3|PRMT|SHF|I?ADD3?$|IADD|LEA|F?SEL$|ISETP|FSETP|V?IMNMX|FMNMX|MOV|PLOP3|SGXT|F2FP|CS2R"
)
_FMA = re.compile(r"IMAD|FFMA|FMUL|FADD|HFMA|IDP")
_SLOW = re.compile(r"LDC|ULDC|S2U?R|MUFU|R2UR|I2F$|F2I|SHFL")


class Processor(msgspec.Struct, frozen=True):
    """One multiprocessor of a GPU, four schedulers, and its share of the memory.

    Attributes:
        name: of the GPU.
        count: how many of them it has.
        clock: GHz.
        bandwidth: bytes a second that the whole GPU moves to and from its memory.
        cache_bytes: bytes a cycle that a processor gets from the second-level cache.
        memory_latency: cycles of a load from memory.
        cache_latency: cycles of a load that the second-level cache holds.
        warps: most resident warps.
        registers: 32-bit registers.
        shared_bytes: shared memory, of which every block takes 1 KiB more.
        alu_cycles: cycles that an integer or logic instruction holds its pipe, of a scheduler.
        fma_cycles: likewise for multiplications and float32.
        matrix_cycles: likewise for a matrix instruction.
        launch: microseconds from one kernel's end to the next one's first instruction.
    """

    name: str
    count: int
    clock: float
    bandwidth: float
    cache_bytes: float = 64.0
    memory_latency: int = 800
    cache_latency: int = 300
    warps: int = 48
    registers: int = 65536
    shared_bytes: int = 100 * 1024
    alu_cycles: int = 2
    fma_cycles: int = 2
    matrix_cycles: int = 16
    launch: float = 2.0


class Op(NamedTuple):
    """One instruction as a warp executes it: which statement, bytes from memory and from cache."""

    statement: int
    memory_bytes: int
    cache_bytes: int
    branches: bool


class Prediction(msgspec.Struct, frozen=True):
    """What the model says of a launch.

    Attributes:
        cycles: of the busiest processor.
        microseconds: of the whole launch.
        memory_bytes: read from and written to memory by all blocks.
        resident: blocks on a processor at a time.
        issued: share of the schedulers' cycles in which an instruction is issued.
    """

    cycles: int
    microseconds: float
    memory_bytes: int
    resident: int
    issued: float


def trace(
    program: Program, launch: Launch, buffers: Sequence[Buffer], streamed: Callable[[int], bool]
) -> list[list[Op]]:
    """Run one block in the emulator and list what each of its warps executes.

    Args:
        program: The kernel, control fields included.
        launch: Of one block.
        buffers: Its memory.
        streamed: Whether the buffer at this address comes from memory, not from a cache; what a
            warp reads again comes from a cache.
    """
    warps: list[list[Op]] = [[] for _ in range(launch.threads // WARP)]
    seen: list[set[int]] = [set() for _ in warps]  # sectors that came from memory before
    addresses = sorted(buffer.address for buffer in buffers)

    def watch(machine: Machine, statement: Statement, at: Mask) -> None:
        rows = at.reshape(-1, WARP)
        sectors = None
        if statement.instruction.opcode in ("LDG", "STG"):
            sectors = _sectors(machine, statement, at).reshape(-1, WARP)
        for warp in np.flatnonzero(rows.any(axis=1)):
            memory = cache = 0
            if sectors is not None:
                touched = np.unique(sectors[warp][sectors[warp] >= 0])
                for first in touched * _SECTOR:
                    base = addresses[np.searchsorted(addresses, first, side="right") - 1]
                    if streamed(int(base)) and first not in seen[warp]:
                        memory += _SECTOR
                        seen[warp].add(first)
                    else:
                        cache += _SECTOR
            index = statement.address // 16
            branches = statement.instruction.opcode == "BRA"
            warps[warp].append(Op(index, memory, cache, branches))

    emulate(program, launch, buffers, watch)
    return warps


def _sectors(machine: Machine, statement: Statement, at: Mask) -> np.ndarray:
    """The sector of each thread that takes part, -1 for the others."""
    instruction = statement.instruction
    mask = at
    if instruction.guard != 7 or instruction.guard_not:
        guard = machine.predicate(machine.vector, "P", instruction.guard, at)
        mask = at & (~guard if instruction.guard_not else guard)
    place = next(o for o in instruction.operands if o.template.startswith("desc"))
    found = _addresses(machine, machine.vector, place, mask).astype(np.int64) // _SECTOR
    return np.where(mask, np.broadcast_to(found, machine.count), -1)


def predict(
    program: Program,
    warps: Sequence[Sequence[Op]],
    processor: Processor,
    *,
    blocks: int,
    shared: int,
    registers: int,
) -> Prediction:
    """Predict a launch whose blocks all do what was traced.

    Args:
        program: The kernel, control fields included.
        warps: From `trace`.
        processor: What it runs on.
        blocks: Of the whole launch.
        shared: Bytes of shared memory of a block.
        registers: Of a thread, reserved ones included.
    """
    threads = len(warps) * WARP
    resident = min(
        processor.warps // len(warps),
        processor.registers // (-(-registers // 8) * 8 * threads),
        processor.shared_bytes // (shared + 1024),
    )
    mine = -(-blocks // processor.count)  # of the busiest processor
    # All share the memory, by what they ask for: the busiest gets more than the average one.
    demand = mine * processor.count / blocks
    machine = _Processor(program, processor, warps, demand)
    cycles = machine.run(mine, resident)
    total = blocks * sum(op.memory_bytes for warp in warps for op in warp)
    microseconds = cycles / processor.clock / 1000 + processor.launch
    microseconds = max(microseconds, total / processor.bandwidth * 1e6 + processor.launch)
    issued = machine.issued / max(4 * cycles, 1)
    return Prediction(cycles, microseconds, total, resident, issued)


class _Processor:
    """The state of one processor: warps wait in a heap for the cycle at which they can issue."""

    def __init__(
        self,
        program: Program,
        processor: Processor,
        warps: Sequence[Sequence[Op]],
        demand: float,
    ) -> None:
        self.program, self.processor, self.warps = program, processor, warps
        self.issued = 0
        self.pipes: dict[tuple[int, str], float] = {}  # (scheduler, pipe) -> free again
        self.memory = self.cache = self.queue = 0.0  # when they are free again
        share = processor.bandwidth / processor.count / (processor.clock * 1e9)
        self.memory_rate = share * demand

    def run(self, blocks: int, resident: int) -> int:
        """Cycles until `blocks` blocks are done, `resident` at a time."""
        heap: list[tuple[float, int, int, int]] = []  # ready, order, block, warp
        place: dict[tuple[int, int], int] = {}
        boards: dict[tuple[int, int], list[float]] = {}
        waiting: dict[int, list[int]] = {}
        left: dict[int, int] = {}
        started = order = 0

        def start(at: float) -> None:
            nonlocal started, order
            for warp in range(len(self.warps)):
                place[started, warp], boards[started, warp] = 0, [0.0] * 6
                heapq.heappush(heap, (at, order, started, warp))
                order += 1
            left[started] = len(self.warps)
            started += 1

        for _ in range(min(resident, blocks)):
            start(0.0)
        end = 0.0
        while heap:
            now, _, block, warp = heapq.heappop(heap)
            ops, at = self.warps[warp], place[block, warp]
            op = ops[at]
            statement = self.program.statements[op.statement]
            control, opcode = statement.control, statement.instruction.opcode
            assert control is not None
            mine = boards[block, warp]
            ready = max([now, *(t for b, t in enumerate(mine) if control.wait >> b & 1)])
            scheduler = (block * len(self.warps) + warp) % 4
            slots = [(scheduler, "issue"), (scheduler, _pipe(opcode))]
            ready = max(ready, *(self.pipes.get(slot, 0.0) for slot in slots))
            if ready > now:
                order += 1
                heapq.heappush(heap, (ready, order, block, warp))
                continue
            self.issued += 1
            self.pipes[slots[0]] = now + 1
            self.pipes[slots[1]] = now + self._held(opcode)
            done = self._finish(opcode, op, now)
            if control.write < 6:
                mine[control.write] = max(mine[control.write], done)
            if control.read < 6:
                mine[control.read] = max(mine[control.read], now + 20)
            following = now + max(control.stall, 1)
            taken = op.branches and at + 1 < len(ops) and ops[at + 1].statement != op.statement + 1
            following += _BRANCH_CYCLES if taken else 0
            place[block, warp] = at + 1
            order += 1
            if at + 1 == len(ops):
                end = max(end, following)
                left[block] -= 1
                if left[block] == 0 and started < blocks:
                    start(following)
            elif opcode == "BAR":
                arrived = waiting.setdefault(block, [])
                arrived.append(warp)
                if len(arrived) == left[block]:
                    for other in waiting.pop(block):
                        order += 1
                        heapq.heappush(heap, (following + 10, order, block, other))
            else:
                heapq.heappush(heap, (following, order, block, warp))
        return int(max(end, self.memory))

    def _held(self, opcode: str) -> int:
        """Cycles until the pipe takes another instruction."""
        processor = self.processor
        held = {
            "matrix": processor.matrix_cycles,
            "alu": processor.alu_cycles,
            "fma": processor.fma_cycles,
            "slow": 4,
        }
        return held.get(_pipe(opcode), 1)

    def _finish(self, opcode: str, op: Op, now: float) -> float:
        """When the results of an instruction on a scoreboard arrive."""
        if op.memory_bytes or op.cache_bytes:
            moved = op.memory_bytes + op.cache_bytes
            self.queue = max(self.queue, now) + moved / 128
            self.cache = max(self.cache, self.queue) + moved / self.processor.cache_bytes
            if op.memory_bytes == 0:
                return self.cache + self.processor.cache_latency
            self.memory = max(self.memory, now) + op.memory_bytes / self.memory_rate
            return max(self.cache, self.memory) + self.processor.memory_latency
        if opcode in ("LDS", "STS"):
            self.queue = max(self.queue, now) + 1
            return self.queue + 30
        return now + (40 if _pipe(opcode) == "slow" else 20)


@functools.cache
def _pipe(opcode: str) -> str:
    kinds = (("matrix", _MATRIX), ("fma", _FMA), ("alu", _ALU), ("slow", _SLOW))
    return next((name for name, known in kinds if known.match(opcode)), "other")
