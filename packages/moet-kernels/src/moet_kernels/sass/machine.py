"""The state of an emulated launch: registers of all threads at once, memory with bounds.

Threads of all blocks of a batch lie along one axis, warp by warp; each has its own program counter.
A step executes one instruction for every thread whose counter is the smallest, so that warps run in
lock step while they agree and diverged threads meet again where their paths do.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from moet_kernels.sass.arch import Architecture
from moet_kernels.sass.errors import EmulationError, Fault
from moet_kernels.sass.operands import NO_PREDICATE, NO_REGISTER, Operand
from moet_kernels.sass.source import Statement

__all__ = ["WARP", "Buffer", "File", "Machine", "Words"]

WARP = 32
Words = NDArray[np.uint32]
Mask = Any
_NOBODY, _SEVERAL = -1, -2


class Buffer(msgspec.Struct):
    """Global memory that a kernel may use.

    Attributes:
        address: where it begins, divisible by 256.
        data: its bytes; the kernel changes them.
        written: which bytes hold a value; reading another is an error.
    """

    address: int
    data: NDArray[np.uint8]
    written: Mask

    @classmethod
    def of(cls, address: int, array: NDArray) -> "Buffer":
        """Make a buffer that holds a copy of an array."""
        data = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8).copy()
        return cls(address, data, np.ones(data.size, bool))

    @classmethod
    def empty(cls, address: int, size: int) -> "Buffer":
        """Make a buffer of bytes that hold nothing yet."""
        return cls(address, np.zeros(size, np.uint8), np.zeros(size, bool))


class File(msgspec.Struct):
    """A register file: 32-bit registers and predicates along an axis of threads or of warps."""

    registers: Words
    known: Mask
    predicates: Mask
    predicates_known: Mask
    zero: int

    @classmethod
    def of_width(cls, width: int, zero: int) -> "File":
        """Make a file in which nothing but the zero register and the true predicate is known."""
        known, predicates_known = np.zeros((256, width), bool), np.zeros((8, width), bool)
        predicates = np.zeros((8, width), bool)
        known[zero] = predicates_known[NO_PREDICATE] = predicates[NO_PREDICATE] = True
        return cls(np.zeros((256, width), np.uint32), known, predicates, predicates_known, zero)


class Machine:
    """A batch of blocks in execution.

    Args:
        arch: whose instructions.
        constants: constant bank 0, parameters included.
        shared_bytes: shared memory of a block, from its first static byte on.
        blocks: (x, y, z) of each block.
        threads: threads a block, a multiple of 32.
        buffers: global memory.
    """

    def __init__(
        self,
        arch: Architecture,
        constants: NDArray[np.uint8],
        shared_bytes: int,
        blocks: NDArray[np.int64],
        threads: int,
        buffers: list[Buffer],
    ) -> None:
        self.arch = arch
        self.constants = constants.view(np.uint32)
        self.threads = threads
        self.count = len(blocks) * threads
        self.warps = self.count // WARP
        self.blocks = blocks
        self.buffers = buffers
        self.vector = File.of_width(self.count, NO_REGISTER)
        self.uniform = File.of_width(self.warps, arch.uniform_zero)
        self.vector.known[1] = True  # R1, the stack pointer
        self.block_of = np.repeat(np.arange(len(blocks)), threads)
        self.warp_of = np.arange(self.count) // WARP
        self.pc = np.zeros(self.count, np.int64)
        self.alive = np.ones(self.count, bool)
        self.waiting = np.zeros(self.count, bool)
        self.wait_mask = np.zeros(self.count, np.uint32)  # lanes a thread waits for; 0: its block
        self.convergence = np.zeros((16, self.count), np.uint32)
        words = -(-shared_bytes // 4)
        self.shared_bytes = shared_bytes
        self.shared = np.zeros((len(blocks), words * 4), np.uint8)
        self.shared_known = np.zeros((len(blocks), words * 4), bool)
        self.epoch = np.zeros(len(blocks), np.int64)
        self.writer = np.full((len(blocks), words), _NOBODY)
        self.reader = np.full((len(blocks), words), _NOBODY)
        self.statement: Statement | None = None
        self.mask = self.alive

    # -- faults

    def fail(self, fault: Fault, message: str, bad: Mask | None = None) -> EmulationError:
        """Make the error for the current instruction; `bad` says which threads are to blame."""
        assert self.statement is not None
        thread = None
        if bad is not None:
            index = int(np.flatnonzero(bad)[0])
            if len(bad) == self.warps and self.warps != self.count:
                index *= WARP
            thread = (index // self.threads, index % self.threads)
        return EmulationError(fault, self.statement.address, self.statement.text, thread, message)

    def unsupported(self, what: str) -> EmulationError:
        """Make the error for what the emulator does not know."""
        return self.fail(Fault.UNSUPPORTED, f"{what} is not emulated.")

    # -- registers

    def per_warp(self, mask: Mask) -> Mask:
        """Which warps have an active thread."""
        return mask.reshape(self.warps, WARP).any(axis=1)

    def read(self, file: File, number: int, mask: Mask) -> Words:
        """Read a register of every thread or warp."""
        if not (file.known[number] | ~mask).all():
            name = "R" if file is self.vector else "UR"
            message = f"{name}{number} was never written."
            raise self.fail(Fault.UNINITIALISED, message, mask & ~file.known[number])
        return file.registers[number]

    def write(self, file: File, number: int, value: Words | np.uint32, mask: Mask) -> None:
        """Write a register of the active threads or warps."""
        if number != file.zero:
            np.copyto(file.registers[number], value, where=mask)
            file.known[number] |= mask

    def read_predicate(self, file: File, operand: Operand, mask: Mask) -> Mask:
        """Read a predicate operand, its negation included."""
        value = self.predicate(file, operand.template, operand.values[0], mask)
        return ~value if operand.not_ else value

    def predicate(self, file: File, template: str, number: int, mask: Mask) -> Mask:
        """Read a predicate register, spread over threads where it is a uniform one."""
        if template == "UP" and file is self.vector:
            value = self.predicate(self.uniform, "UP", number, self.per_warp(mask))
            return value[self.warp_of]
        if not (file.predicates_known[number] | ~mask).all():
            name = f"{template}{number} was never written."
            raise self.fail(Fault.UNINITIALISED, name, mask & ~file.predicates_known[number])
        return file.predicates[number]

    def write_predicate(self, file: File, operand: Operand, value: Mask, mask: Mask) -> None:
        """Write a predicate register of the active threads or warps."""
        number = operand.values[0]
        if number != NO_PREDICATE:
            np.copyto(file.predicates[number], value, where=mask)
            file.predicates_known[number] |= mask

    # -- memory

    def constant(self, offset: int) -> np.uint32:
        """Read a 32-bit word of constant bank 0."""
        if offset % 4 or not 0 <= offset < 4 * len(self.constants):
            raise self.fail(
                Fault.OUT_OF_BOUNDS,
                f"constant bank 0 has no word at {offset:#x}; it ends at "
                f"{4 * len(self.constants):#x} (.parameters says how many bytes there are).",
            )
        return self.constants[offset // 4]

    def global_index(
        self, addresses: NDArray[np.uint64], size: int, active: Mask
    ) -> list[tuple[Buffer, Mask, NDArray[np.int64]]]:
        """Find the buffer of each active address: (buffer, threads, byte offsets of those)."""
        self._aligned(addresses, size, active)
        found, rest = [], active.copy()
        for buffer in self.buffers:
            offset = (addresses - np.uint64(buffer.address)).view(np.int64)
            inside = rest & (offset >= 0) & (offset + size <= buffer.data.size)
            if inside.any():
                found.append((buffer, inside, offset[inside]))
                rest &= ~inside
        if rest.any():
            address = int(addresses[rest][0])
            message = f"no buffer holds the {size} bytes at {address:#x}."
            raise self.fail(Fault.OUT_OF_BOUNDS, message, rest)
        return found

    def shared_index(
        self, addresses: NDArray[np.uint64], size: int, active: Mask
    ) -> NDArray[np.int64]:
        """Turn shared addresses of the active threads into byte offsets in the block's memory."""
        self._aligned(addresses, size, active)
        offset = addresses.view(np.int64) - self.arch.shared_base
        bad = active & ((offset < 0) | (offset + size > self.shared_bytes))
        if bad.any():
            address = int(addresses[bad][0])
            message = (
                f"shared memory ends at {self.arch.shared_base + self.shared_bytes:#x}; "
                f"{size} bytes at {address:#x} are outside."
            )
            raise self.fail(Fault.OUT_OF_BOUNDS, message, bad)
        return offset

    def _aligned(self, addresses: NDArray[np.uint64], size: int, active: Mask) -> None:
        bad = active & (addresses % np.uint64(size) != 0)
        if bad.any():
            message = f"address {int(addresses[bad][0]):#x} is not divisible by {size}."
            raise self.fail(Fault.MISALIGNED, message, bad)

    def track_shared(
        self, offset: NDArray[np.int64], size: int, active: Mask, *, write: bool
    ) -> None:
        """Find accesses of two warps to one word without a barrier between them."""
        block, warp = self.block_of[active], self.warp_of[active]
        for word in range(-(-size // 4)):
            at = offset[active] // 4 + word
            last = self.writer[block, at]
            clash = (last != _NOBODY) & (last != warp)
            if write:
                readers = self.reader[block, at]
                clash |= (readers != _NOBODY) & (readers != warp)
            if clash.any():
                bad = np.zeros(self.count, bool)
                bad[np.flatnonzero(active)[clash]] = True
                where = self.arch.shared_base + 4 * int(at[clash][0])
                kind = "written" if write else "read"
                message = (
                    f"the word at {where:#x} is {kind} here and was accessed by another warp, "
                    "with no barrier in between."
                )
                raise self.fail(Fault.RACE, message, bad)
            if write:
                self._one_value(block, at, active)
                self.writer[block, at] = warp
            else:
                readers = self.reader[block, at]
                alone = (readers == _NOBODY) | (readers == warp)
                self.reader[block, at] = np.where(alone, warp, _SEVERAL)

    def _one_value(self, block: NDArray, at: NDArray, active: Mask) -> None:
        if self.statement is not None and "." not in self.statement.instruction.mnemonic:
            place = block * self.writer.shape[1] + at
            _, first, counts = np.unique(place, return_index=True, return_counts=True)
            if (counts > 1).any():
                bad = np.zeros(self.count, bool)
                bad[np.flatnonzero(active)[first[counts > 1]]] = True
                message = "two threads write the same word in one instruction."
                raise self.fail(Fault.RACE, message, bad)

    def pass_barrier(self, blocks: NDArray[np.int64]) -> None:
        """All threads of these blocks met: what they did before cannot race with what follows."""
        self.writer[blocks] = _NOBODY
        self.reader[blocks] = _NOBODY


Operation = Callable[[Machine, File, Statement, Mask], None]
"""Executes a statement for the masked threads (or warps, with the uniform file)."""
