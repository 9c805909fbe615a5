"""Floating-point instructions for the emulator: rounding to nearest even, exact otherwise."""

from typing import Any

import numpy as np

from moet_core.floats import float64_to_e4m3
from moet_kernels.sass.machine import File, Machine, Mask, Operation, Words
from moet_kernels.sass.operands import Operand
from moet_kernels.sass.source import Statement
from moet_kernels.sass.values import float32, integer, raw, signed, to_float32

__all__ = ["OPERATIONS"]

_ORDERED = {
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "EQ": np.equal,
}
_KNOWN = frozenset({"FTZ", "RN", "AND", "OR", "XOR", "SAT"})


def _check_modifiers(machine: Machine, statement: Statement, known: frozenset[str]) -> bool:
    """Refuse what is not modelled; return whether subnormals are flushed."""
    for modifier in statement.instruction.modifiers:
        if modifier not in known:
            raise machine.unsupported(f"{statement.instruction.opcode}.{modifier}")
    return "FTZ" in statement.instruction.modifiers


def _write(
    machine: Machine, file: File, statement: Statement, words: Words, mask: Mask, *, flush: bool
) -> None:
    if flush:
        tiny = (words & np.uint32(0x7F800000)) == 0
        words = np.where(tiny, words & np.uint32(0x80000000), words)
    if "SAT" in statement.instruction.modifiers:
        value = words.view(np.float32)
        value = np.where(np.isnan(value), np.float32(0), np.clip(value, 0, 1))
        words = (value + np.float32(0)).astype(np.float32).view(np.uint32)
    number = statement.instruction.operands[0].values[0]
    machine.write(file, number, words.astype(np.uint32), mask)


def add(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """FADD d, a, b."""
    flush = _check_modifiers(machine, statement, _KNOWN)
    a, b = _floats(machine, file, statement.instruction.operands[1:3], mask, flush=flush)
    with np.errstate(invalid="ignore"):
        total = np.asarray(a + b)
    _write(machine, file, statement, to_float32(total), mask, flush=flush)


def multiply(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """FMUL d, a, b."""
    flush = _check_modifiers(machine, statement, _KNOWN)
    a, b = _floats(machine, file, statement.instruction.operands[1:3], mask, flush=flush)
    with np.errstate(invalid="ignore"):
        product = np.asarray(a * b)
    _write(machine, file, statement, to_float32(product), mask, flush=flush)


def fused(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """FFMA d, a, b, c: one rounding."""
    flush = _check_modifiers(machine, statement, _KNOWN)
    a, b, c = _floats(machine, file, statement.instruction.operands[1:4], mask, flush=flush)
    with np.errstate(invalid="ignore"):
        product = a * b  # exact: 48 bits
        total = np.asarray(product + c)
        back = total - product
        error = (product - (total - back)) + (c - back)
        error = np.where(np.isfinite(error), error, 0.0)
    _write(machine, file, statement, to_float32(total, error), mask, flush=flush)


def _floats(
    machine: Machine, file: File, operands: tuple[Operand, ...], mask: Mask, *, flush: bool
) -> list[Any]:
    shape = file.registers.shape[1:]
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return [
            np.broadcast_to(float32(machine, file, operand, mask, flush=flush), shape).astype(
                np.float64
            )
            for operand in operands
        ]


def extreme(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """FMNMX[.NAN] d, a, b, p: the smaller where p holds; a NaN loses, with .NAN it wins.

    -0 is below +0.
    """
    flush = _check_modifiers(machine, statement, _KNOWN | {"NAN"})
    *_, a, b, p = statement.instruction.operands
    x, y = (
        np.broadcast_to(
            float32(machine, file, o, mask, flush=flush), file.registers.shape[1:]
        ).astype(np.float32)
        for o in (a, b)
    )
    least = machine.read_predicate(file, p, mask)
    below = (x < y) | ((x == y) & np.signbit(x))
    chosen = np.where(below == least, x, y)
    chosen = np.where(np.isnan(x), y, np.where(np.isnan(y), x, chosen)).view(np.uint32)
    none = np.isnan(x) & np.isnan(y)
    if "NAN" in statement.instruction.modifiers:
        none = np.isnan(x) | np.isnan(y)
    words = np.where(none, np.uint32(0x7FFFFFFF), chosen)
    _write(machine, file, statement, words, mask, flush=flush)


def compare(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """FSETP.cmp[U].bool p, q, a, b, c: U also holds where a or b is a NaN."""
    test, *others = statement.instruction.modifiers
    p, q, a, b, c = statement.instruction.operands
    flush = "FTZ" in others
    x, y = (float32(machine, file, o, mask, flush=flush) for o in (a, b))
    unordered = np.isnan(x) | np.isnan(y)
    if test == "NUM":
        holds: Any = ~unordered
    elif test == "NAN":
        holds = unordered
    elif test.startswith("NE"):
        holds = (x != y) & ~unordered
    else:
        holds = _ORDERED[test.removesuffix("U")](x, y) & ~unordered
    if test.endswith("U") and test != "NUM":
        holds = holds | unordered
    other = machine.read_predicate(file, c, mask)
    for out, value in ((p, holds), (q, ~holds)):
        combined = value & other if "AND" in others else value | other
        combined = value ^ other if "XOR" in others else combined
        machine.write_predicate(file, out, combined, mask)


def pack(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """F2FP.{F16,BF16}.F32.PACK_AB d, a, b and F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C d, a, b, c.

    a comes into the high half or byte, b into the low; c into the high half above two bytes.
    """
    modifiers = statement.instruction.modifiers
    if modifiers == ("SATFINITE", "E4M3", "F32", "PACK_AB_MERGE_C"):
        d, *pair, c = statement.instruction.operands
        values = _floats(machine, file, tuple(pair), mask, flush=False)
        with np.errstate(invalid="ignore"):  # registers of threads that do not take part
            high, low = (float64_to_e4m3(value) for value in values)
        above = np.asarray(integer(machine, file, c, mask)) << np.uint32(16)
        words = high.astype(np.uint32) << np.uint32(8) | low | above
        machine.write(file, d.values[0], words, mask)
        return
    d, a, b = statement.instruction.operands
    if "PACK_AB" not in modifiers or "F32" not in modifiers or "RELU" in modifiers:
        raise machine.unsupported(statement.instruction.mnemonic)
    halves = []
    for operand in (a, b):
        value = np.asarray(float32(machine, file, operand, mask, flush=False))
        halves.append(_bfloat16(value) if "BF16" in modifiers else _float16(value))
    machine.write(file, d.values[0], halves[0] << np.uint32(16) | halves[1], mask)


def _bfloat16(value: Any) -> Words:
    bits = value.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint32(0x7FFF), rounded)


def _float16(value: Any) -> Words:
    with np.errstate(over="ignore"):
        bits = value.astype(np.float16).view(np.uint16).astype(np.uint32)
    return np.where(np.isnan(value), np.uint32(0x7FFF), bits)


def half_fused(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """HFMA2[.MMA] d, a, b, c on pairs of float16; c or b can be two immediates."""
    known = frozenset({"MMA"})
    _check_modifiers(machine, statement, known)
    d, *sources = statement.instruction.operands
    pairs: list[Any] = []
    while sources:
        operand = sources.pop(0)
        if operand.template == "H":
            low = sources.pop(0)
            pairs.append(np.uint32(operand.values[0] << 16 | low.values[0]))
            continue
        if operand.template not in ("R", "UR"):
            raise machine.unsupported(f"the operand {operand.template}")
        value = np.asarray(raw(machine, file, operand, mask))
        value = value & np.uint32(0x7FFF7FFF) if operand.absolute else value
        pairs.append(value ^ np.uint32(0x80008000) if operand.negate else value)
    result: Any = np.uint32(0)
    for shift in (0, 16):
        a, b, c = (
            (np.asarray(p) >> np.uint32(shift)).astype(np.uint16).view(np.float16).astype(float)
            for p in pairs
        )
        with np.errstate(invalid="ignore", over="ignore"):
            half = (a * b + c).astype(np.float16)  # exact sum in float64: 22 + 11 bits within 53
        bits = np.where(np.isnan(half), 0x7FFF, half.view(np.uint16)).astype(np.uint32)
        result = result | bits << np.uint32(shift)
    machine.write(file, d.values[0], result, mask)


def from_integer(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """I2F[.U32].RP is refused; I2F, I2FP: to nearest even."""
    known = frozenset({"F32", "S32", "U32"})
    _check_modifiers(machine, statement, known)
    d, a = statement.instruction.operands
    value = np.asarray(integer(machine, file, a, mask))
    exact = value if "U32" in statement.instruction.modifiers else signed(value)
    machine.write(file, d.values[0], exact.astype(np.float32).view(np.uint32), mask)


def special_function(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """MUFU.{EX2,RCP} d, a: rounded to nearest; the hardware may be off by the last bits."""
    a = statement.instruction.operands[1]
    if statement.instruction.modifiers not in (("EX2",), ("RCP",)):
        raise machine.unsupported(statement.instruction.mnemonic)
    function = np.exp2 if statement.instruction.modifiers == ("EX2",) else np.reciprocal
    (value,) = _floats(machine, file, (a,), mask, flush=True)
    with np.errstate(all="ignore"):
        words = to_float32(function(value))
    _write(machine, file, statement, words, mask, flush=True)


OPERATIONS: dict[str, Operation] = {
    "MUFU": special_function,
    "FADD": add,
    "FMUL": multiply,
    "FFMA": fused,
    "FMNMX": extreme,
    "FSETP": compare,
    "F2FP": pack,
    "HFMA2": half_fused,
    "I2F": from_integer,
    "I2FP": from_integer,
}
