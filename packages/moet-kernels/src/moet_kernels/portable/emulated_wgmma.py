"""Warpgroup MMAs for the emulator: A in registers, B in shared memory with a swizzle of 128 bytes.

What they compute reaches the accumulators when their group is waited for. Until then it is an error
to touch an accumulator or a register of A, but for MMAs that add to the same accumulators, or to
write what they read of shared memory. Registers that were written since the last WARPGROUP.ARRIVE
are not for them to read.

Layouts (PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate", m64nNk16): each warp
has 16 rows of A and D as `mma.m16n8k16` has them; the 64 bits of the descriptor, and where its
swizzle puts 16-byte pieces: bits 4 to 6 of an address are xored with bits 7 to 9.
"""

import re
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from moet_kernels.portable.emulated_copies import begin_reading, end_reading
from moet_kernels.sass.errors import Fault
from moet_kernels.sass.machine import WARP, File, Machine, Mask, Operation, Words
from moet_kernels.sass.source import Statement

__all__ = ["OPERATIONS", "note_write", "refuse_in_flight"]

_WARPS = 4
"""Of a warpgroup."""

_SHAPE = re.compile(r"64x(\d+)x16")
_SWIZZLE_128 = 1
_G, _T = np.arange(WARP) >> 2, np.arange(WARP) & 3


class _Mma(msgspec.Struct):
    """One instruction under way, of some warpgroups."""

    warpgroups: Mask
    group: NDArray[np.int64]
    a: int
    d: int
    vectors: int
    blocks: NDArray[np.int64]
    pieces: NDArray[np.int64]


class _UnderWay(msgspec.Struct):
    """Warpgroup MMAs of a batch of blocks that were not waited for.

    Attributes:
        mmas: In order.
        group: How many groups each warpgroup has ended.
        results: Of registers [256, threads], while `adding` is not 0.
        adding: How many MMAs add to a register.
        reading: How many MMAs have a register as part of A.
        new: Registers written since the last WARPGROUP.ARRIVE.
    """

    mmas: list[_Mma]
    group: NDArray[np.int64]
    results: NDArray[np.float32]
    adding: NDArray[np.uint8]
    reading: NDArray[np.uint8]
    new: NDArray[np.bool_]


def _under_way(machine: Machine) -> _UnderWay:
    if "mmas_under_way" not in machine.__dict__:
        shape = machine.vector.registers.shape
        machine.__dict__["mmas_under_way"] = _UnderWay(
            [],
            np.zeros(machine.warps // _WARPS, np.int64),
            np.zeros(shape, np.float32),
            np.zeros(shape, np.uint8),
            np.zeros(shape, np.uint8),
            np.ones(shape, bool),
        )
    made: _UnderWay = machine.__dict__["mmas_under_way"]
    return made


def refuse_in_flight(machine: Machine, file: File, number: int, mask: Mask) -> None:
    """Raise if an instruction touches a register of MMAs that are under way."""
    state = machine.__dict__.get("mmas_under_way")
    if state is None or not state.mmas or file is not machine.vector:
        return
    _refuse(machine, state.adding, number, "the accumulator", mask)
    _refuse(machine, state.reading, number, "part of A", mask)


def _refuse(machine: Machine, count: NDArray[np.uint8], number: int, what: str, mask: Mask) -> None:
    bad = mask & (count[number] > 0)
    if bad.any():
        message = f"R{number} is {what} of an MMA that was not waited for."
        raise machine.fail(Fault.IN_FLIGHT, message, bad)


def note_write(machine: Machine, file: File, number: int, mask: Mask) -> None:
    """Note that a register is not for MMAs before the next WARPGROUP.ARRIVE."""
    state = machine.__dict__.get("mmas_under_way")
    if state is not None and file is machine.vector:
        state.new[number] |= mask


def _warpgroup(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """WARPGROUP.ARRIVE; WARPGROUP.DEPBAR.LE gsb0, n: all groups but the last n have ended."""
    del file
    state, whole = _under_way(machine), _whole_warpgroups(machine, mask)
    if statement.instruction.modifiers == ("ARRIVE",):
        state.new &= ~mask
        return
    if statement.instruction.modifiers != ("DEPBAR", "LE"):
        raise machine.unsupported(statement.text)
    left = int(statement.instruction.operands[-1].values[0])
    under_way = []
    for mma in state.mmas:
        done = mma.warpgroups & whole & (mma.group < state.group - left)
        if done.any():
            _end(machine, state, mma, done)
            mma.warpgroups &= ~done
        if mma.warpgroups.any():
            under_way.append(mma)
    state.mmas[:] = under_way


def _end(machine: Machine, state: _UnderWay, mma: _Mma, done: Mask) -> None:
    threads = np.repeat(done, _WARPS * WARP)
    file = machine.vector
    a, d = slice(mma.a, mma.a + 4), slice(mma.d, mma.d + mma.vectors // 2)
    state.reading[a] -= threads
    state.adding[d] -= threads
    last = threads & (state.adding[d] == 0)
    np.copyto(file.registers[d], state.results[d].view(np.uint32), where=last)
    file.known[d] |= last
    end_reading(machine, mma.blocks[done], mma.pieces[done])


def _product(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """HGMMA.64xNx16.F32.BF16 d, a, gdesc[UR], d, [gsb0]: d += a b, gsb0 ends a group.

    Products are exact, their sum is one of float64, rounded to float32 once: how the hardware
    rounds is not modelled. B's bytes that nothing wrote are NaN.
    """
    shape, *kind = statement.instruction.modifiers
    d, a, descriptor, c, *end = statement.instruction.operands
    found = _SHAPE.fullmatch(shape)
    expected = kind == ["F32", "BF16"] and descriptor.template == "gdesc[UR]"
    if not (found and expected and a.template == "R" and c == d):
        raise machine.unsupported(statement.text)
    vectors = int(found[1])
    state, whole = _under_way(machine), _whole_warpgroups(machine, mask)
    numbers = range(d.values[0], d.values[0] + vectors // 2)
    a_numbers = range(a.values[0], a.values[0] + 4)
    for number in (*a_numbers, *numbers):
        if (mask & state.new[number]).any():
            message = f"R{number} was written after the last WARPGROUP.ARRIVE."
            raise machine.fail(Fault.IN_FLIGHT, message, mask & state.new[number])
    for number in numbers:  # that are accumulators already may be added to
        _refuse(machine, state.reading, number, "part of A", mask)

    blocks = np.arange(machine.warps // _WARPS) * _WARPS * WARP // machine.threads
    places = _places(machine, descriptor.values[0] + 2, vectors, whole)
    pieces = places[..., ::8] // 16
    pieces_of = np.zeros((len(whole), *pieces.shape[1:]), np.int64)
    pieces_of[whole] = pieces
    begin_reading(machine, blocks[whole], pieces, mask)
    b = _vectors(machine, blocks[whole], places).repeat(_WARPS, axis=0)

    warps = np.flatnonzero(np.repeat(whole, _WARPS))
    weights = _rows(np.stack([machine.read(file, number, mask) for number in a_numbers]), warps)
    start = _start(machine, state, numbers, warps)
    with np.errstate(invalid="ignore", over="ignore"):
        total = start.astype(np.float64)
        for k in range(16):  # one after the other, whatever the number of vectors is
            total += weights[:, :, k, None] * b[:, None, :, k]
        result = total.astype(np.float32)
    rows, columns = _d_places(vectors)
    threads = (warps[:, None] * WARP + np.arange(WARP)).reshape(-1)
    values = result[:, rows, columns].transpose(1, 0, 2).reshape(vectors // 2, -1)
    state.results[numbers.start : numbers.stop, threads] = values
    state.adding[numbers.start : numbers.stop, threads] += 1
    state.reading[a_numbers.start : a_numbers.stop, threads] += 1
    state.mmas.append(
        _Mma(whole, state.group.copy(), a_numbers[0], numbers[0], vectors, blocks, pieces_of)
    )
    if end:
        state.group[whole] += 1


def _places(machine: Machine, number: int, vectors: int, whole: Mask) -> NDArray[np.int64]:
    """Offsets in shared memory of B's elements [warpgroups, vectors, 16]; the registers of the warp
    have the descriptor.
    """
    words = [machine.read(machine.uniform, number + i, np.repeat(whole, _WARPS)) for i in (0, 1)]
    each = (words[0].astype(np.uint64) | words[1].astype(np.uint64) << np.uint64(32)).reshape(-1, 4)
    each = each[whole]
    if (each != each[:, :1]).any():
        raise machine.unsupported("a descriptor that differs within a warpgroup")
    bits = each[:, 0].astype(object)
    swizzles = {int(value) >> 62 for value in bits}
    if swizzles != {_SWIZZLE_128} or any(int(value) >> 49 & 7 for value in bits):
        raise machine.unsupported("a descriptor without a swizzle of 128 bytes or with an offset")
    start = np.array([(int(value) & 0x3FFF) << 4 for value in bits])[:, None, None]
    stride = np.array([(int(value) >> 32 & 0x3FFF) << 4 for value in bits])[:, None, None]
    vector, column = np.arange(vectors)[:, None], np.arange(16)
    linear = start + vector // 8 * stride + vector % 8 * 128 + 2 * column
    place = (linear ^ (linear >> 7 & 7) << 4) - machine.arch.shared_base
    if place.min() < 0 or place.max() + 2 > machine.shared_bytes:
        raise machine.fail(Fault.OUT_OF_BOUNDS, "the MMA reads outside of shared memory.")
    return place


def _vectors(
    machine: Machine, blocks: NDArray[np.int64], places: NDArray[np.int64]
) -> NDArray[np.float64]:
    at = blocks[:, None, None], places // 2
    bits = machine.shared.view(np.uint16)[at].astype(np.uint32) << np.uint32(16)
    known = machine.shared_known.view(np.uint16)[at] == 0x0101
    return np.where(known, bits.view(np.float32), np.nan).astype(np.float64)


def _rows(words: Words, warps: NDArray[np.int64]) -> NDArray[np.float64]:
    """A's elements [warps, 16, 16] from words [4, threads]."""
    register, lane, item = np.meshgrid(range(4), range(WARP), range(2), indexing="ij")
    pairs = np.ascontiguousarray(words.reshape(4, -1, WARP)[:, warps].transpose(1, 0, 2))
    halves = pairs.view(np.uint16).reshape(len(warps), 4, WARP, 2).astype(np.uint32)
    matrix = np.zeros((len(warps), 16, 16))
    rows, columns = _G[lane] + 8 * (register & 1), 2 * _T[lane] + item + 8 * (register >> 1)
    matrix[:, rows, columns] = (halves << np.uint32(16)).view(np.float32)
    return matrix


def _d_places(vectors: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and columns of a warp's part of D [vectors / 2, 32]."""
    e = np.arange(vectors // 2)[:, None]
    return _G + 8 * (e >> 1 & 1), 8 * (e >> 2) + 2 * _T + (e & 1)


def _start(
    machine: Machine, state: _UnderWay, numbers: range, warps: NDArray[np.int64]
) -> NDArray[np.float32]:
    """The accumulators [warps, 16, vectors], those of MMAs under way included."""
    span = slice(numbers.start, numbers.stop)
    held = machine.vector.registers[span].view(np.float32)
    values = np.where(state.adding[span] > 0, state.results[span], held)
    matrix = np.zeros((len(warps), 16, 2 * len(numbers)), np.float32)
    rows, columns = _d_places(2 * len(numbers))
    matrix[:, rows, columns] = values.reshape(len(numbers), -1, WARP)[:, warps].transpose(1, 0, 2)
    return matrix


def _whole_warpgroups(machine: Machine, mask: Mask) -> Mask:
    """Which warpgroups take part [warpgroups], with all their threads."""
    if machine.threads % (_WARPS * WARP):
        raise machine.unsupported("a warpgroup instruction in a block that has part of one")
    threads = mask.reshape(-1, _WARPS * WARP)
    partly = threads.any(axis=1) & ~threads.all(axis=1)
    if partly.any():
        message = "a warpgroup instruction needs all 128 threads."
        raise machine.fail(Fault.DEADLOCK, message, np.repeat(partly, _WARPS * WARP) & mask)
    whole: Any = threads[:, 0].copy()
    return whole


OPERATIONS: dict[str, Operation] = {"HGMMA": _product, "WARPGROUP": _warpgroup}
