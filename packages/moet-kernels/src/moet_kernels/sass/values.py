"""Operands of an emulated instruction as arrays."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moet_kernels.sass.machine import File, Machine, Mask, Words
from moet_kernels.sass.operands import Operand

__all__ = ["float32", "integer", "pair", "predicate_or_true", "raw", "signed", "to_float32"]

_TINY = np.float32(2.0**-126)


def raw(machine: Machine, file: File, operand: Operand, mask: Mask, part: int = 0) -> Any:
    """The bits of an operand, flags not applied; `part` counts registers or words from it on."""
    template = operand.template
    if template.startswith(("I", "F", "N", "D")):
        value = operand.values[0]
        return np.uint32(value >> 32 * part & 0xFFFFFFFF)
    if template.startswith("UR") and file is machine.vector:
        number = operand.values[0]
        if number == machine.uniform.zero:
            return np.uint32(0)
        warps = machine.per_warp(mask)
        return machine.read(machine.uniform, number + part, warps)[machine.warp_of]
    if template.startswith(("R", "UR")):
        number = operand.values[0]
        return np.uint32(0) if number == file.zero else machine.read(file, number + part, mask)
    if template == "c[I][I]":
        bank, offset = operand.values
        if bank:
            raise machine.unsupported(f"constant bank {bank}")
        return machine.constant(offset + 4 * part)
    raise machine.unsupported(f"the operand {template}")


def integer(machine: Machine, file: File, operand: Operand, mask: Mask) -> Any:
    """An operand as 32 bits, negation as two's complement, `~` as complement."""
    if ".H" in operand.template or ".B" in operand.template:
        raise machine.unsupported(f"the operand {operand.template}")
    value = raw(machine, file, operand, mask)
    if operand.absolute:
        value = np.abs(value.view(np.int32)).view(np.uint32)
    if operand.invert:
        value = ~value
    return (np.uint32(0) - value).astype(np.uint32) if operand.negate else value


def signed(value: Any) -> Any:
    """The same bits as a signed number."""
    return np.asarray(value).astype(np.uint32).view(np.int32)


def pair(machine: Machine, file: File, operand: Operand, mask: Mask) -> Any:
    """A 64-bit operand: two registers, two constant words, or a sign-extended immediate."""
    if operand.template in ("I", "N"):
        low = operand.values[0]
        extended = low if low >> 32 or not low >> 31 else low | 0xFFFFFFFF << 32
        return np.uint64(extended)
    first = np.asarray(raw(machine, file, operand, mask)).astype(np.uint64)
    second = np.asarray(raw(machine, file, operand, mask, 1)).astype(np.uint64)
    value = first | second << np.uint64(32)
    if operand.invert:
        value = ~value
    return (np.uint64(0) - value).astype(np.uint64) if operand.negate else value


def float32(machine: Machine, file: File, operand: Operand, mask: Mask, *, flush: bool) -> Any:
    """An operand as float32; `flush` makes subnormals zero, as .FTZ does."""
    value = np.asarray(raw(machine, file, operand, mask)).view(np.float32)
    if operand.absolute:
        value = np.abs(value)
    if operand.negate:
        value = -value
    return _flushed(value) if flush else value


def _flushed(value: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(np.abs(value) < _TINY, np.copysign(np.float32(0), value), value)


def to_float32(exact: NDArray[np.float64], error: NDArray[np.float64] | float = 0.0) -> Words:
    """Round to float32, to nearest even, as one rounding of `exact + error`.

    `exact` is a rounded float64 sum and `error` what that rounding lost. Where something was lost
    and the last bit is even, the last bit is set (rounding to odd), which makes the second rounding
    right: float64 has more than twice the bits of float32 plus two.
    """
    lost = np.asarray(error) != 0
    if lost.any():
        bits = exact.view(np.int64)
        even = (bits & 1) == 0
        # The true value lies towards `error`; with an even last bit, its neighbour there is odd.
        away = (np.asarray(error) > 0) == (exact > 0)
        fixed = np.where(lost & even & np.isfinite(exact), bits + np.where(away, 1, -1), bits)
        exact = fixed.view(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        result = exact.astype(np.float32)
    words = result.view(np.uint32)
    return np.where(np.isnan(result), np.uint32(0x7FFFFFFF), words)


def predicate_or_true(machine: Machine, file: File, operand: Operand | None, mask: Mask) -> Any:
    """A predicate operand; true where there is none."""
    if operand is None:
        return np.True_
    return machine.read_predicate(file, operand, mask)
