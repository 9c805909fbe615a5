"""Instructions for the emulator that nvcc uses and the hand-written kernels do not."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moet_kernels.sass.errors import Fault
from moet_kernels.sass.float_ops import from_integer
from moet_kernels.sass.machine import WARP, File, Machine, Mask, Operation, Words
from moet_kernels.sass.matrix_ops import _fragment, _places, _whole_warps, write_words
from moet_kernels.sass.memory_ops import _addresses
from moet_kernels.sass.operands import Operand
from moet_kernels.sass.source import Statement
from moet_kernels.sass.values import integer, raw

__all__ = ["OPERATIONS"]


def _words(machine: Machine, value: Any) -> NDArray[np.uint32]:
    return np.broadcast_to(np.asarray(value), machine.count).astype(np.uint32)


def _vote(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """VOTE.ANY d, PT, p: which lanes have the predicate, in a register of theirs or of the warp."""
    d, _, p = statement.instruction.operands
    held = (machine.read_predicate(machine.vector, p, mask) & mask).reshape(-1, WARP)
    ballot = (held.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(axis=1)
    words = ballot.astype(np.uint32)
    if d.template == "UR":
        machine.write(machine.uniform, d.values[0], words, mask.reshape(-1, WARP).any(axis=1))
    else:
        machine.write(file, d.values[0], np.repeat(words, WARP), mask)


def _add_then_least(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """VIADDMNMX d, a, b, c, p: the lesser of a + b and c, without p the greater."""
    d, a, b, c, least = statement.instruction.operands
    x, y, z = (_words(machine, integer(machine, file, each, mask)) for each in (a, b, c))
    kind: Any = np.uint32 if "U32" in statement.instruction.modifiers else np.int32
    total, other = (x + y).view(kind), z.view(kind)
    wanted = machine.read_predicate(file, least, mask)
    found = np.where(wanted, np.minimum(total, other), np.maximum(total, other))
    machine.write(file, d.values[0], np.ascontiguousarray(found).view(np.uint32), mask)


def _atomic_add(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """REDG.ADD, ATOMG.ADD of 32 bits, whose old value nobody reads."""
    place, source = statement.instruction.operands[-2:]
    addends = _words(machine, integer(machine, file, source, mask))
    addresses = _addresses(machine, file, place, mask)
    for buffer, threads, offset in machine.global_index(addresses, 4, mask):
        np.add.at(buffer.data.view(np.uint32), offset // 4, addends[threads])


def _special_function(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """MUFU.EX2, MUFU.RCP, to the nearest float32."""
    d, a = statement.instruction.operands
    value = _words(machine, raw(machine, file, a, mask)).view(np.float32).astype(np.float64)
    value = np.abs(value) if a.absolute else value
    value = -value if a.negate else value
    function: Callable[..., Any] = {"EX2": np.exp2, "RCP": np.reciprocal}[
        statement.instruction.modifiers[0]
    ]
    with np.errstate(all="ignore"):
        found = function(value).astype(np.float32)
    machine.write(file, d.values[0], found.view(np.uint32), mask)


def _multiply_pairs(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """HMUL2.BF16_V2: products of pairs of bfloat16 that are exact, or it is an error."""
    d, a, b, *low_half = statement.instruction.operands
    halves = []
    for operand in (a, b):
        if operand.template == "H":  # two immediates
            words = _words(machine, operand.values[0] << 16 | low_half[0].values[0])
        else:
            words = np.where(mask, _words(machine, raw(machine, file, operand, mask)), 0)
        if operand.negate:
            raise machine.unsupported(statement.text)
        halves.append([(words << shift & 0xFFFF0000).astype(np.uint32) for shift in (16, 0)])
    products = [x.view(np.float32) * y.view(np.float32) for x, y in zip(*halves, strict=True)]
    low, high = (product.view(np.uint32) for product in products)
    if ((low | high) & 0xFFFF).any():
        raise machine.unsupported("a product of bfloat16 that has to be rounded")
    machine.write(file, d.values[0], low >> np.uint32(16) | high, mask)


def _from_integer(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """I2F.RP of a signed number: rounded up. Otherwise see `float_ops`."""
    if statement.instruction.modifiers != ("RP",):
        from_integer(machine, file, statement, mask)
        return
    d, a = statement.instruction.operands
    exact = _words(machine, integer(machine, file, a, mask)).view(np.int32).astype(np.float64)
    near = exact.astype(np.float32)
    up = np.where(near < exact, np.nextafter(near, np.float32(np.inf)), near)
    machine.write(file, d.values[0], up.view(np.uint32), mask)


def _to_integer(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """F2I.FTZ.U32.TRUNC.NTZ: towards zero; F2I.NTZ: to the nearest int32, ties to even.

    What is out of range becomes the nearest in range.
    """
    d, a = statement.instruction.operands
    modifiers = statement.instruction.modifiers
    if modifiers not in (("FTZ", "U32", "TRUNC", "NTZ"), ("NTZ",)):
        raise machine.unsupported(statement.text)
    value = _words(machine, raw(machine, file, a, mask)).view(np.float32).astype(np.float64)
    if a.negate or a.absolute or np.isnan(value[mask]).any():
        raise machine.unsupported(f"{statement.text} of such a number")
    if modifiers == ("NTZ",):
        whole = np.clip(np.nan_to_num(np.rint(value)), -(2**31), 2**31 - 1).astype(np.int32)
        machine.write(file, d.values[0], whole.view(np.uint32), mask)
        return
    whole = np.clip(np.nan_to_num(np.trunc(value)), 0, 2**32 - 1).astype(np.uint32)
    machine.write(file, d.values[0], whole, mask)


def _local(machine: Machine, file: File, place: Operand, mask: Mask) -> tuple[Words, Mask]:
    """A word of the threads' own memory, and which threads wrote theirs; at one place in all."""
    addresses = np.unique(_addresses(machine, file, place, mask)[mask])
    if len(addresses) != 1 or addresses[0] % 4:
        raise machine.unsupported("local memory at a place that differs between threads")
    words: dict[int, tuple[Words, Mask]] = machine.__dict__.setdefault("local_memory", {})
    empty = np.zeros(machine.count, np.uint32), np.zeros(machine.count, bool)
    return words.setdefault(int(addresses[0]), empty)


def _load_local(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """LDL[.LU] of 32 bits; with .LU nothing loads them again."""
    modifiers = statement.instruction.modifiers
    if modifiers not in ((), ("LU",)):
        raise machine.unsupported(statement.text)
    d, place = statement.instruction.operands
    words, written = _local(machine, file, place, mask)
    if not written[mask].all():
        message = "the bytes loaded were never written."
        raise machine.fail(Fault.UNINITIALISED, message, mask & ~written)
    machine.write(file, d.values[0], words, mask)
    if modifiers:
        written[mask] = False


def _store_local(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """STL of 32 bits."""
    if statement.instruction.modifiers:
        raise machine.unsupported(statement.text)
    place, source = statement.instruction.operands
    words, written = _local(machine, file, place, mask)
    words[mask] = _words(machine, raw(machine, file, source, mask))[mask]
    written[mask] = True


def _nothing(_machine: Machine, _file: File, _statement: Statement, _mask: Mask) -> None:
    pass  # the kernel in front has ended


def _byte_product(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """IMMA.16832.S8.S8 d, a, b, RZ: an exact sum of 32 products of signed bytes."""
    d, a, b, c = statement.instruction.operands
    if statement.instruction.modifiers != ("16832", "S8", "S8") or c.values[0] != file.zero:
        raise machine.unsupported(statement.text)
    warps = _whole_warps(machine, mask)
    rows, columns, b_columns, b_rows = _places(4)
    matrix_a, matrix_b = np.zeros((len(warps), 16, 32)), np.zeros((len(warps), 32, 8))
    matrix_a[:, rows, columns] = _fragment(machine, file, a, 4, mask, warps, np.int8)
    matrix_b[:, b_rows, b_columns] = _fragment(machine, file, b, 2, mask, warps, np.int8)
    result = (matrix_a @ matrix_b).astype(np.int32).view(np.uint32)
    write_words(machine, file, d, result, warps)


def _save_predicates(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """P2R d, PR, RZ, which: the thread's predicates as bits of a register."""
    d, *_, zero, which = statement.instruction.operands
    chosen = int(which.values[0])
    if zero.values[0] != file.zero or chosen >> 7:
        raise machine.unsupported(statement.text)
    words = np.zeros(machine.count, np.uint32)
    for number in range(7):
        if chosen >> number & 1:
            held = machine.predicate(file, "P", number, mask)
            words |= held.astype(np.uint32) << np.uint32(number)
    machine.write(file, d.values[0], words, mask)


OPERATIONS: dict[str, Operation] = {
    "P2R": _save_predicates,
    "IMMA": _byte_product,
    "VOTE": _vote,
    "VOTEU": _vote,
    "VIADDMNMX": _add_then_least,
    "REDG": _atomic_add,
    "ATOMG": _atomic_add,
    "MUFU": _special_function,
    "HMUL2": _multiply_pairs,
    "I2F": _from_integer,
    "F2I": _to_integer,
    "LDL": _load_local,
    "STL": _store_local,
    "ACQBULK": _nothing,
    "PREEXIT": _nothing,
}
