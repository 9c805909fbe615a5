"""Loads, stores, constants, special registers and warp shuffles for the emulator."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moet_kernels.sass.errors import Fault
from moet_kernels.sass.machine import WARP, File, Machine, Mask, Operation
from moet_kernels.sass.operands import Operand
from moet_kernels.sass.source import Statement
from moet_kernels.sass.values import integer, raw

__all__ = ["OPERATIONS"]

_SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_CACHE = frozenset({"E", "CONSTANT", "EF", "EL", "LU", "NA", "STRONG", "GPU", "SYS", "LTC128B"})


def _size(machine: Machine, statement: Statement) -> tuple[int, bool]:
    """Bytes a thread moves, and whether they are sign-extended."""
    size, sign = 4, False
    for modifier in statement.instruction.modifiers:
        if modifier in _SIZES:
            size, sign = _SIZES[modifier], modifier.startswith("S")
        elif modifier not in _CACHE:
            raise machine.unsupported(f"{statement.instruction.opcode}.{modifier}")
    return size, sign


def _addresses(machine: Machine, file: File, operand: Operand, mask: Mask) -> NDArray[np.uint64]:
    """The address of each thread: registers and offset of `[R.64+UR+I]` added up."""
    template = operand.template.removeprefix("desc[UR]")
    values = list(operand.values[operand.template.startswith("desc") :])
    total: Any = np.zeros(machine.count, np.uint64)
    for part in template.strip("[]").split("+"):
        value = values.pop(0)
        if part == "I":
            total = total + np.uint64(value)
            continue
        name = part.split(".")[0]
        wide = (name == "R" and "64" in part) or (
            name == "UR"
            and "global" not in part
            and (operand.template.startswith("desc") and "R.64" not in template)
        )
        if part not in ("R", "R.64", "UR", "R.U32"):
            raise machine.unsupported(f"the address {operand.template}")
        register = Operand(name, (value,))
        zero = machine.uniform.zero if name == "UR" else file.zero
        if value == zero:
            continue
        total = total + np.asarray(raw(machine, file, register, mask)).astype(np.uint64)
        if wide:
            high = np.asarray(raw(machine, file, register, mask, 1)).astype(np.uint64)
            total = total + (high << np.uint64(32))
    if not operand.template.startswith("desc"):
        total = total & np.uint64(0xFFFFFFFF)
    return total


def load(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """LDG, LDS: every byte must have been written before."""
    size, sign = _size(machine, statement)
    d, place = statement.instruction.operands[0], statement.instruction.operands[-1]
    addresses = _addresses(machine, file, place, mask)
    data = np.zeros((machine.count, max(size, 4)), np.uint8)
    if statement.instruction.opcode == "LDS":
        offset = machine.shared_index(addresses, size, mask)
        rows = machine.block_of[mask], offset[mask]
        known = _gather(machine.shared_known, rows, size)
        _require(machine, mask, known)
        data[mask, :size] = _gather(machine.shared, rows, size)
        machine.track_shared(offset, size, mask, write=False)
    else:
        for buffer, threads, offset in machine.global_index(addresses, size, mask):
            spread = offset[:, None] + np.arange(size)
            _require(machine, threads, buffer.written[spread])
            data[threads, :size] = buffer.data[spread]
    words = data.view(np.uint32)
    if sign:
        shift = 32 - 8 * size
        extended = (words << np.uint32(shift)).view(np.int32) >> shift
        words = extended.view(np.uint32)
    number = d.values[0]
    if number != file.zero:
        for part in range(words.shape[1]):
            machine.write(file, number + part, words[:, part], mask)


def _gather(rows: NDArray, at: tuple[NDArray, NDArray], size: int) -> NDArray:
    return rows[at[0][:, None], at[1][:, None] + np.arange(size)]


def _require(machine: Machine, threads: Mask, known: NDArray[np.bool_]) -> None:
    complete = known.all(axis=1)
    if not complete.all():
        bad = np.zeros(machine.count, bool)
        bad[np.flatnonzero(threads)[~complete]] = True
        raise machine.fail(Fault.UNINITIALISED, "the bytes loaded were never written.", bad)


def store(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """STG, STS."""
    size, _ = _size(machine, statement)
    place, source = statement.instruction.operands
    addresses = _addresses(machine, file, place, mask)
    parts = [
        np.broadcast_to(np.asarray(raw(machine, file, source, mask, part)), machine.count)
        for part in range(max(size // 4, 1))
    ]
    data = np.ascontiguousarray(np.stack(parts, axis=1)).view(np.uint8)[:, :size]
    if statement.instruction.opcode == "STS":
        offset = machine.shared_index(addresses, size, mask)
        machine.track_shared(offset, size, mask, write=True)
        at = machine.block_of[mask][:, None], offset[mask][:, None] + np.arange(size)
        machine.shared[at] = data[mask]
        machine.shared_known[at] = True
    else:
        for buffer, threads, offset in machine.global_index(addresses, size, mask):
            spread = offset[:, None] + np.arange(size)
            buffer.data[spread] = data[threads]
            buffer.written[spread] = True


def load_constant(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """LDC, LDCU, ULDC [.64, .128] d, c[0][offset]."""
    d, source = statement.instruction.operands
    size = 4
    for modifier in statement.instruction.modifiers:
        if modifier not in ("64", "128"):
            raise machine.unsupported(statement.instruction.mnemonic)
        size = _SIZES[modifier]
    for part in range(size // 4):
        value = raw(machine, file, source, mask, part)
        if d.values[0] != file.zero:
            machine.write(file, d.values[0] + part, value, mask)


def special(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """S2R, S2UR, CS2R d, special register."""
    d, source = statement.instruction.operands
    name = source.template
    blocks = machine.blocks[machine.block_of]
    thread = np.arange(machine.count) % machine.threads
    known: dict[str, Any] = {
        "SR_TID.X": thread,
        "SR_TID.Y": thread * 0,
        "SR_TID.Z": thread * 0,
        "SR_CTAID.X": blocks[:, 0],
        "SR_CTAID.Y": blocks[:, 1],
        "SR_CTAID.Z": blocks[:, 2],
        "SR_LANEID": thread % WARP,
        "SR_CgaCtaId": thread * 0,
        "SRZ": thread * 0,
    }
    if name not in known:
        raise machine.unsupported(f"the special register {name}")
    value = np.asarray(known[name]).astype(np.uint32)
    if file is machine.uniform:
        value = value[::WARP]
    wide = statement.instruction.opcode == "CS2R" and "32" not in statement.instruction.modifiers
    for part in range(2 if wide else 1):
        if d.values[0] != file.zero:
            machine.write(file, d.values[0] + part, value, mask)


def to_uniform(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """R2UR ur, r: the value of the first active thread, which all must share."""
    del file
    d, a = statement.instruction.operands[0], statement.instruction.operands[-1]
    value = np.broadcast_to(integer(machine, machine.vector, a, mask), machine.count)
    rows, active = value.reshape(-1, WARP), mask.reshape(-1, WARP)
    first = rows[np.arange(machine.warps), active.argmax(axis=1)]
    machine.write(machine.uniform, d.values[0], first, active.any(axis=1))


def shuffle(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """SHFL.{IDX,UP,DOWN,BFLY} p, d, a, lane, clamp (PTX ISA, shfl.sync)."""
    p, d, a, lane_operand, clamp_operand = statement.instruction.operands
    mode = statement.instruction.modifiers[0]
    value = np.broadcast_to(integer(machine, file, a, mask), machine.count)
    b = np.broadcast_to(integer(machine, file, lane_operand, mask), machine.count).astype(np.int64)
    c = np.broadcast_to(integer(machine, file, clamp_operand, mask), machine.count).astype(np.int64)
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    lane = np.arange(machine.count) % WARP
    highest = (lane & segment) | (clamp & ~segment)
    lowest = lane & segment
    source = {
        "IDX": lowest | (b & ~segment),
        "UP": lane - b,
        "DOWN": lane + b,
        "BFLY": lane ^ b,
    }[mode]
    inside = source >= highest if mode == "UP" else source <= highest
    source = np.where(inside, source, lane) + np.arange(machine.count) // WARP * WARP
    if not mask[source[mask]].all():
        bad = mask & ~mask[source]
        raise machine.fail(Fault.UNINITIALISED, "the lane read from does not take part.", bad)
    machine.write(file, d.values[0], value[source], mask)
    machine.write_predicate(file, p, inside, mask)


OPERATIONS: dict[str, Operation] = {
    "LDG": load,
    "LDS": load,
    "STG": store,
    "STS": store,
    "LDC": load_constant,
    "LDCU": load_constant,
    "ULDC": load_constant,
    "S2R": special,
    "S2UR": special,
    "CS2R": special,
    "R2UR": to_uniform,
    "SHFL": shuffle,
}
