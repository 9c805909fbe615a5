"""Copies to shared memory that run beside the threads, as the emulator has them.

A copy's bytes reach shared memory when they are waited for and not before, so that reading too
early finds nothing. What threads and their copies wrote is for warpgroup MMAs to read once the
writing thread has fenced it and a barrier has been passed.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from moet_kernels.sass.errors import Fault
from moet_kernels.sass.machine import _NOBODY, _SEVERAL, File, Machine, Mask, Operation
from moet_kernels.sass.memory_ops import _addresses, _require, store
from moet_kernels.sass.source import Statement

__all__ = ["OPERATIONS", "begin_reading", "end_reading"]

_PIECE = 16
"""Bytes of a copy, and what a swizzle moves as one."""


class _Copy(msgspec.Struct):
    """16 bytes of each of some threads, under way to shared memory."""

    threads: Mask
    group: NDArray[np.int64]
    to: NDArray[np.int64]
    data: NDArray[np.uint8]


class _Shared(msgspec.Struct):
    """What is under way in the shared memory of a batch of blocks.

    Attributes:
        copies: Not waited for.
        group: How many groups of copies each thread has ended.
        arriving: Which pieces [blocks, pieces] copies will change.
        unfenced: By word [blocks, words], the thread that wrote it and has not fenced it, or -1.
        readers: Warpgroup MMAs under way that read a piece [blocks, pieces].
    """

    copies: list[_Copy]
    group: NDArray[np.int64]
    arriving: NDArray[np.bool_]
    unfenced: NDArray[np.int32]
    readers: NDArray[np.int32]


def _shared(machine: Machine) -> _Shared:
    blocks, size = machine.shared.shape
    pieces = -(-size // _PIECE)
    if "shared_under_way" not in machine.__dict__:
        machine.__dict__["shared_under_way"] = _Shared(
            [],
            np.zeros(machine.count, np.int64),
            np.zeros((blocks, pieces), bool),
            np.full((blocks, size // 4), -1, np.int32),
            np.zeros((blocks, pieces), np.int32),
        )
    made: _Shared = machine.__dict__["shared_under_way"]
    return made


def begin_reading(
    machine: Machine, blocks: NDArray[np.int64], pieces: NDArray[np.int64], bad: Mask
) -> None:
    """Check that warpgroup MMAs may read now, and note that they do.

    Args:
        machine: The blocks that run.
        blocks: [warpgroups].
        pieces: 16-byte pieces of a block's shared memory [warpgroups, ...].
        bad: Threads to blame.
    """
    shared = _shared(machine)
    blocks = blocks.reshape(-1, *[1] * (pieces.ndim - 1))
    words = 4 * pieces[..., None] + np.arange(4)
    if shared.arriving[blocks, pieces].any():
        raise machine.fail(Fault.IN_FLIGHT, "copies to what the MMA reads are under way.", bad)
    if (machine.writer[blocks[..., None], words] != _NOBODY).any():
        message = "what the MMA reads was written with no barrier in between."
        raise machine.fail(Fault.RACE, message, bad)
    if (shared.unfenced[blocks[..., None], words] >= 0).any():
        message = "what the MMA reads was not fenced by the thread that wrote it."
        raise machine.fail(Fault.RACE, message, bad)
    np.add.at(shared.readers, (blocks, pieces), 1)


def end_reading(machine: Machine, blocks: NDArray[np.int64], pieces: NDArray[np.int64]) -> None:
    """Note that MMAs which `begin_reading` was told of were waited for."""
    blocks = blocks.reshape(-1, *[1] * (pieces.ndim - 1))
    np.subtract.at(_shared(machine).readers, (blocks, pieces), 1)
    # A write by any warp is a race until all have heard of the end.
    machine.reader[blocks[..., None], 4 * pieces[..., None] + np.arange(4)] = _SEVERAL


def _refuse_if_read(machine: Machine, at: NDArray[np.int64], mask: Mask) -> None:
    bad = mask.copy()
    bad[mask] = _shared(machine).readers[machine.block_of[mask], at[mask] // _PIECE] > 0
    if bad.any():
        message = "MMAs that read this shared memory are under way."
        raise machine.fail(Fault.IN_FLIGHT, message, bad)


def _start_copy(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """LDGSTS.128: its bytes are taken now, and lie in shared memory once they are waited for."""
    places = [each for each in statement.instruction.operands if "[" in each.template]
    if "128" not in statement.instruction.modifiers:
        raise machine.unsupported(statement.text)
    at = machine.shared_index(_addresses(machine, file, places[0], mask), _PIECE, mask)
    data = np.zeros((machine.count, _PIECE), np.uint8)
    addresses = _addresses(machine, file, places[1], mask)
    for buffer, threads, offset in machine.global_index(addresses, _PIECE, mask):
        spread = offset[:, None] + np.arange(_PIECE)
        _require(machine, threads, buffer.written[spread])
        data[threads] = buffer.data[spread]
    _refuse_if_read(machine, at, mask)
    machine.track_shared(at, _PIECE, mask, write=True)
    shared, blocks = _shared(machine), machine.block_of[mask]
    machine.shared_known[blocks[:, None], at[mask][:, None] + np.arange(_PIECE)] = False
    shared.arriving[blocks, at[mask] // _PIECE] = True
    shared.copies.append(_Copy(mask.copy(), shared.group.copy(), at.copy(), data))


def _end_group(machine: Machine, _file: File, _statement: Statement, mask: Mask) -> None:
    """LDGDEPBAR: the copies so far are a group."""
    _shared(machine).group[mask] += 1


def _wait_for_copies(machine: Machine, _file: File, statement: Statement, mask: Mask) -> None:
    """DEPBAR.LE SB0, n: all groups but the last n are there."""
    left = int(statement.instruction.operands[-1].values[0])
    shared = _shared(machine)
    under_way = []
    for copy in shared.copies:
        done = copy.threads & mask & (copy.group < shared.group - left)
        block, at = machine.block_of[done], copy.to[done]
        place = block[:, None], at[:, None] + np.arange(_PIECE)
        machine.shared[place] = copy.data[done]
        machine.shared_known[place] = True
        shared.arriving[block, at // _PIECE] = False
        words = block[:, None], at[:, None] // 4 + np.arange(_PIECE // 4)
        machine.writer[words] = machine.warp_of[done][:, None]
        shared.unfenced[words] = np.flatnonzero(done)[:, None]
        copy.threads &= ~done
        if copy.threads.any():
            under_way.append(copy)
    shared.copies[:] = under_way


def _store(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """STS: see `memory_ops.store`."""
    place = statement.instruction.operands[0]
    at = machine.shared_index(_addresses(machine, file, place, mask), 1, mask)
    _refuse_if_read(machine, at, mask)
    store(machine, file, statement, mask)
    shared, threads = _shared(machine), np.flatnonzero(mask)
    size = {"64": 8, "128": 16}.get((*statement.instruction.modifiers, "")[0], 4)
    for word in range(size // 4):
        shared.unfenced[machine.block_of[mask], at[mask] // 4 + word] = threads


def _fence(machine: Machine, _file: File, statement: Statement, mask: Mask) -> None:
    """FENCE.VIEW.ASYNC.S: what a thread wrote to shared memory is for MMAs to read."""
    if statement.instruction.modifiers != ("VIEW", "ASYNC", "S"):
        raise machine.unsupported(statement.text)
    unfenced = _shared(machine).unfenced
    unfenced[(unfenced >= 0) & mask[unfenced]] = -1


def _nothing(_machine: Machine, _file: File, _statement: Statement, _mask: Mask) -> None:
    pass  # threads see each other's writes at once


OPERATIONS: dict[str, Operation] = {
    "LDGSTS": _start_copy,
    "LDGDEPBAR": _end_group,
    "DEPBAR": _wait_for_copies,
    "STS": _store,
    "FENCE": _fence,
    "MEMBAR": _nothing,
}
