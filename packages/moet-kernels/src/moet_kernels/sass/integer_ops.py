"""Integer, bit and predicate instructions, and moves, for the emulator."""

from typing import Any

import numpy as np

from moet_kernels.sass.machine import File, Machine, Mask, Operation
from moet_kernels.sass.operands import NO_PREDICATE, Operand
from moet_kernels.sass.source import Statement
from moet_kernels.sass.values import integer, pair, predicate_or_true, raw, signed

__all__ = ["OPERATIONS"]

_LOW = np.uint64(0xFFFFFFFF)
_COMPARE = {
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "EQ": np.equal,
    "NE": np.not_equal,
}


def _wide(value: Any) -> Any:
    return np.asarray(value).astype(np.uint64)


def _split(operands: tuple[Operand, ...]) -> tuple[list[Operand], list[Operand], list[Operand]]:
    """Destination and predicates before the first source, sources, predicates behind them."""
    head = [operands[0]]
    rest = list(operands[1:])
    while rest and rest[0].is_predicate:
        head.append(rest.pop(0))
    tail: list[Operand] = []
    while rest and rest[-1].is_predicate:
        tail.insert(0, rest.pop())
    return head, rest, tail


def _write64(machine: Machine, file: File, operand: Operand, value: Any, mask: Mask) -> None:
    number = operand.values[0]
    if number != file.zero:
        machine.write(file, number, (value & _LOW).astype(np.uint32), mask)
        machine.write(file, number + 1, (value >> np.uint64(32)).astype(np.uint32), mask)


def move(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """MOV[.64] d, a."""
    d, a = statement.instruction.operands[:2]
    if "64" in statement.instruction.modifiers:
        _write64(machine, file, d, np.asarray(pair(machine, file, a, mask)), mask)
    else:
        machine.write(file, d.values[0], integer(machine, file, a, mask), mask)


def add3(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """IADD3[.64] d, [carry outs], a, b, c, [carry ins]: with .X the carries come in."""
    head, sources, tail = _split(statement.instruction.operands)
    if "64" in statement.instruction.modifiers:
        if tail or any(carry.values[0] != NO_PREDICATE for carry in head[1:]):
            raise machine.unsupported("a carry of IADD3.64")
        sums = [np.asarray(pair(machine, file, operand, mask)) for operand in sources]
        _write64(machine, file, head[0], np.asarray(sums[0] + sums[1] + sums[2]), mask)
        return
    total: Any = np.uint64(0)
    for operand in sources:
        total = total + _wide(integer(machine, file, operand, mask))
        # -x is ~x + 1; the carry of that 1 is part of the sum, also where x is 0.
        if operand.negate:
            zero = np.asarray(raw(machine, file, operand, mask)) == 0
            total = total + np.where(zero, np.uint64(1) << np.uint64(32), np.uint64(0))
    for operand in tail:
        total = total + machine.read_predicate(file, operand, mask).astype(np.uint64)
    carry = total >> np.uint64(32)
    machine.write(file, head[0].values[0], (total & _LOW).astype(np.uint32), mask)
    for place, operand in enumerate(head[1:]):
        machine.write_predicate(file, operand, np.asarray(carry > place), mask)


def add2(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """IADD d, a, b, and IADD.64."""
    d, a, b = statement.instruction.operands
    if "64" in statement.instruction.modifiers:
        value = pair(machine, file, a, mask) + pair(machine, file, b, mask)
        _write64(machine, file, d, np.asarray(value), mask)
    else:
        value = integer(machine, file, a, mask) + integer(machine, file, b, mask)
        machine.write(file, d.values[0], value, mask)


def multiply_add(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """IMAD d, a, b, c: low half; .HI: high half of the product and a 64-bit c; .WIDE: all 64."""
    modifiers = statement.instruction.modifiers
    head, sources, tail = _split(statement.instruction.operands)
    a, b = (integer(machine, file, operand, mask) for operand in sources[:2])
    carry = sum(machine.read_predicate(file, p, mask).astype(np.uint64) for p in tail)
    if "WIDE" not in modifiers and "HI" not in modifiers:
        value = np.asarray(a * b + integer(machine, file, sources[2], mask))
        value = (value + np.asarray(carry).astype(np.uint32)).astype(np.uint32)
        machine.write(file, head[0].values[0], value, mask)
        return
    if len(head) > 1:
        raise machine.unsupported("a carry out of IMAD.WIDE or IMAD.HI")
    if "U32" in modifiers:
        product = _wide(a) * _wide(b)
    else:
        product = (signed(a).astype(np.int64) * signed(b).astype(np.int64)).view(np.uint64)
    total = product + pair(machine, file, sources[2], mask) + np.asarray(carry).astype(np.uint64)
    total = np.asarray(total)
    if "WIDE" in modifiers:
        _write64(machine, file, head[0], total, mask)
    else:
        high = (total >> np.uint64(32)).astype(np.uint32)
        machine.write(file, head[0].values[0], high, mask)


def scaled_add(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """LEA d, [carry out], a, b, [high of a], shift: (a << shift) + b; .HI: its high word."""
    modifiers = statement.instruction.modifiers
    head, sources, tail = _split(statement.instruction.operands)
    shift = np.uint64(sources[-1].values[0])
    a = _wide(integer(machine, file, sources[0], mask))
    b = _wide(integer(machine, file, sources[1], mask))
    if "HI" in modifiers:
        if "SX32" in modifiers:
            low = integer(machine, file, sources[0], mask)
            a = signed(low).astype(np.int64).view(np.uint64)
        else:
            a = a | _wide(integer(machine, file, sources[2], mask)) << np.uint64(32)
        a = (a << shift) >> np.uint64(32)
    else:
        a = (a << shift) & _LOW
    total = np.asarray(a + b)
    for operand in tail:
        total = total + machine.read_predicate(file, operand, mask).astype(np.uint64)
    machine.write(file, head[0].values[0], (total & _LOW).astype(np.uint32), mask)
    for operand in head[1:]:
        machine.write_predicate(file, operand, (total >> np.uint64(32)) != 0, mask)


def logic3(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """LOP3.LUT [p], d, a, b, c, table, [q]: bit i of the table is the result for (a, b, c) = i."""
    operands = list(statement.instruction.operands)
    out = operands.pop(0) if operands[0].is_predicate else None
    a, b, c = (integer(machine, file, operand, mask) for operand in operands[1:4])
    table = operands[4].values[0]
    value = np.asarray(_lookup3(a, b, c, table))
    machine.write(file, operands[0].values[0], value, mask)
    if out is not None:
        extra = predicate_or_true(machine, file, operands[5], mask)
        machine.write_predicate(file, out, (value != 0) | extra, mask)


def _lookup3(a: Any, b: Any, c: Any, table: int) -> Any:
    result: Any = np.uint32(0)
    for case in range(8):
        if table >> case & 1:
            x = a if case & 4 else ~a
            y = b if case & 2 else ~b
            result = result | (x & y & (c if case & 1 else ~c))
    return result


def logic3_predicates(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """PLOP3.LUT p, q, a, b, c, table of p, table of q."""
    operands = statement.instruction.operands
    a, b, c = (machine.read_predicate(file, operand, mask) for operand in operands[2:5])
    case = a.astype(np.int64) * 4 + b * 2 + c
    for out, table in zip(operands[:2], operands[5:7], strict=True):
        machine.write_predicate(file, out, (table.values[0] >> case & 1).astype(bool), mask)


def funnel_shift(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """SHF.{L,R}[.W].{type}[.HI] d, low, n, high: shift the 64 bits high:low."""
    modifiers = statement.instruction.modifiers
    d, low, amount, high = statement.instruction.operands
    n = _wide(integer(machine, file, amount, mask))
    limit = 63 if "U64" in modifiers or "S64" in modifiers else 31
    n = n & np.uint64(limit) if "W" in modifiers else np.minimum(n, np.uint64(limit + 1))
    value = _wide(integer(machine, file, low, mask))
    value = value | _wide(integer(machine, file, high, mask)) << np.uint64(32)
    if "L" in modifiers:
        value = np.where(n > 63, np.uint64(0), value << np.minimum(n, np.uint64(63)))
        part = value >> np.uint64(32) if "HI" in modifiers else value
    elif "HI" in modifiers:
        top = value >> np.uint64(32)
        if "S32" in modifiers or "S64" in modifiers:
            top = signed(top & _LOW).astype(np.int64)
            part = (top >> np.minimum(n, np.uint64(63)).astype(np.int64)).view(np.uint64)
        else:
            part = np.where(n > 63, np.uint64(0), top >> np.minimum(n, np.uint64(63)))
    else:
        shift = np.minimum(n, np.uint64(63))
        if "S32" in modifiers or "S64" in modifiers:
            part = (value.view(np.int64) >> shift.astype(np.int64)).view(np.uint64)
        else:
            part = np.where(n > 63, np.uint64(0), value >> shift)
    machine.write(file, d.values[0], (np.asarray(part) & _LOW).astype(np.uint32), mask)


def permute(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """PRMT d, a, selectors, b: nibble i of the selectors picks byte i out of b:a."""
    if statement.instruction.modifiers:
        raise machine.unsupported(f"PRMT.{statement.instruction.modifiers[0]}")
    d, a, select, b = (statement.instruction.operands[i] for i in range(4))
    low, high = _wide(integer(machine, file, a, mask)), _wide(integer(machine, file, b, mask))
    both = low | high << np.uint64(32)
    chosen = _wide(integer(machine, file, select, mask))
    result: Any = np.uint64(0)
    for i in range(4):
        nibble = chosen >> np.uint64(4 * i)
        byte = both >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = (byte >> np.uint64(7)) * np.uint64(255)
        byte = np.where(nibble & np.uint64(8), sign, byte)
        result = result | byte << np.uint64(8 * i)
    machine.write(file, d.values[0], np.asarray(result).astype(np.uint32), mask)


def select(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """SEL[.64] d, a, b, p, and FSEL, whose sources can be negated floats."""
    d, a, b, p = statement.instruction.operands
    if "64" in statement.instruction.modifiers:
        chosen = machine.read_predicate(file, p, mask)
        x, y = (pair(machine, file, operand, mask) for operand in (a, b))
        _write64(machine, file, d, np.where(chosen, x, y), mask)
        return
    values: list[Any] = []
    for operand in (a, b):
        value = raw(machine, file, operand, mask)
        if statement.instruction.opcode.endswith("FSEL"):
            value = value & np.uint32(0x7FFFFFFF) if operand.absolute else value
            value = value ^ np.uint32(0x80000000) if operand.negate else value
        else:
            value = integer(machine, file, operand, mask)
        values.append(value)
    chosen = np.where(machine.read_predicate(file, p, mask), values[0], values[1])
    machine.write(file, d.values[0], chosen.astype(np.uint32), mask)


def compare(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """ISETP.cmp[.U32].bool[.EX] p, q, a, b, c, [low]: p = (a cmp b) bool c, q its contrary."""
    modifiers = statement.instruction.modifiers
    p, q, a, b, c, *low = statement.instruction.operands
    if "S64" in modifiers or "U64" in modifiers:
        x, y = (np.asarray(pair(machine, file, operand, mask)) for operand in (a, b))
        x, y = (v.view(np.int64) if "S64" in modifiers else v for v in (x, y))
    else:
        x, y = (integer(machine, file, operand, mask) for operand in (a, b))
        x, y = (np.asarray(v) if "U32" in modifiers else signed(v) for v in (x, y))
    holds = np.asarray(_COMPARE[modifiers[0]](x, y))
    if "EX" in modifiers:
        below = machine.read_predicate(file, low[0], mask)
        equal = x == y
        strict = np.asarray(_COMPARE[modifiers[0]](x, y)) & ~equal
        holds = {"EQ": equal & below, "NE": ~equal | below}.get(
            modifiers[0], np.where(equal, below, strict)
        )
    _write_compared(machine, file, (p, q, c), holds, mask, modifiers)


def _write_compared(
    machine: Machine,
    file: File,
    operands: tuple[Operand, Operand, Operand],
    holds: Any,
    mask: Mask,
    modifiers: tuple[str, ...],
) -> None:
    p, q, c = operands
    other = machine.read_predicate(file, c, mask)
    for out, value in ((p, holds), (q, ~holds)):
        if "AND" in modifiers:
            combined = value & other
        elif "OR" in modifiers:
            combined = value | other
        else:
            combined = value ^ other
        machine.write_predicate(file, out, combined, mask)


def extreme(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """IMNMX, VIMNMX d, [q,] a, b, p: the smaller where p holds, else the larger."""
    operands = statement.instruction.operands
    d, a, b, p = operands[0], operands[-3], operands[-2], operands[-1]
    x, y = (integer(machine, file, operand, mask) for operand in (a, b))
    smaller = x < y if "U32" in statement.instruction.modifiers else signed(x) < signed(y)
    least = machine.read_predicate(file, p, mask)
    chosen = np.where(smaller == least, x, y)
    machine.write(file, d.values[0], chosen.astype(np.uint32), mask)


def count_ones(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """POPC d, a."""
    d, a = statement.instruction.operands
    value = np.bitwise_count(np.asarray(integer(machine, file, a, mask))).astype(np.uint32)
    machine.write(file, d.values[0], value, mask)


def leading_one(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """FLO.U32[.SH] d, a: position of the highest one, -1 for none; .SH: distance from the top."""
    if "U32" not in statement.instruction.modifiers:
        raise machine.unsupported("FLO of a signed number")
    d, *_, a = [o for o in statement.instruction.operands if not o.is_predicate]
    x = np.asarray(integer(machine, file, a, mask))
    _, exponent = np.frexp(x.astype(np.float64))
    place = exponent.astype(np.int64) - 1
    place = 31 - place if "SH" in statement.instruction.modifiers else place
    value = np.where(x == 0, -1, place).astype(np.int64).astype(np.uint32)
    machine.write(file, d.values[0], value, mask)


def reverse(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """BREV d, a: bit i becomes bit 31 - i."""
    d, a = statement.instruction.operands
    x = np.broadcast_to(np.asarray(integer(machine, file, a, mask)), file.registers.shape[1:])
    bits = np.unpackbits(np.ascontiguousarray(x).view(np.uint8), bitorder="little").reshape(-1, 32)
    value = np.packbits(bits[:, ::-1], bitorder="little").view(np.uint32)
    machine.write(file, d.values[0], value, mask)


def absolute(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """IABS d, a."""
    d, a = statement.instruction.operands
    value = np.abs(signed(integer(machine, file, a, mask)).astype(np.int64)).astype(np.uint32)
    machine.write(file, d.values[0], value, mask)


def sign_extend(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """SGXT[.U32] d, a, width: keep the low bits and extend the sign (.U32: with zeros)."""
    d, a, width = statement.instruction.operands
    n = np.minimum(_wide(integer(machine, file, width, mask)), np.uint64(32)).astype(np.int64)
    up = 32 - n
    x = _wide(integer(machine, file, a, mask)) << up.astype(np.uint64) & _LOW
    if "U32" in statement.instruction.modifiers:
        value = x >> up.astype(np.uint64)
    else:
        value = (signed(x).astype(np.int64) >> up).view(np.uint64) & _LOW
    machine.write(file, d.values[0], np.asarray(value).astype(np.uint32), mask)


OPERATIONS: dict[str, Operation] = {
    "MOV": move,
    "IADD3": add3,
    "IADD": add2,
    "VIADD": add2,
    "IMAD": multiply_add,
    "LEA": scaled_add,
    "LOP3": logic3,
    "PLOP3": logic3_predicates,
    "SHF": funnel_shift,
    "PRMT": permute,
    "SEL": select,
    "FSEL": select,
    "ISETP": compare,
    "IMNMX": extreme,
    "VIMNMX": extreme,
    "POPC": count_ones,
    "FLO": leading_one,
    "BREV": reverse,
    "IABS": absolute,
    "SGXT": sign_extend,
}
