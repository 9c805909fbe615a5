"""Matrix instructions for the emulator.

Fragments (PTX ISA, "Matrix Fragments for mma.m16n8k16 / m16n8k32"), lane = 4 g + t:

- A, 16-bit: a0 (g, 2t..), a1 (g + 8, 2t..), a2 (g, 2t + 8..), a3 (g + 8, 2t + 8..), two each.
- A, 8-bit: a0 (g, 4t..), a1 (g + 8, 4t..), a2 (g, 4t + 16..), a3 (g + 8, 4t + 16..), four each.
- B is the same with rows as columns: b0 like a0, b1 like a2.
- C, D: c0, c1 (g, 2t..), c2, c3 (g + 8, 2t..).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moet_kernels.sass.errors import Fault
from moet_kernels.sass.machine import WARP, File, Machine, Mask, Operation, Words
from moet_kernels.sass.operands import Operand
from moet_kernels.sass.source import Statement
from moet_kernels.sass.values import raw

__all__ = ["E4M3", "OPERATIONS", "truncated_sum", "write_words"]

_G, _T = np.arange(WARP) >> 2, np.arange(WARP) & 3
_ALIGNED_BITS = 25  # fraction bits kept below the largest term; see truncated_sum


def _places(elements: int) -> tuple[NDArray, NDArray, NDArray, NDArray]:
    """Rows and columns of A's [4, 32, elements], then columns and rows of B's [2, 32, elements]."""
    register, lane, item = np.meshgrid(
        np.arange(4), np.arange(WARP), np.arange(elements), indexing="ij"
    )
    rows = _G[lane] + 8 * (register & 1)
    columns = _T[lane] * elements + item + 4 * elements * (register >> 1)
    return rows, columns, _G[lane][:2], (columns[::2])


_C_ROWS = np.stack([_G, _G, _G + 8, _G + 8])
_C_COLUMNS = np.stack([2 * _T, 2 * _T + 1, 2 * _T, 2 * _T + 1])


def half_product(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """HMMA.16816.F32[.BF16] d, a, b, c."""
    modifiers = statement.instruction.modifiers
    if modifiers[:2] != ("16816", "F32") or not set(modifiers[2:]) <= {"BF16"}:
        raise machine.unsupported(statement.instruction.mnemonic)
    warps = _whole_warps(machine, mask)
    d, a, b, c = statement.instruction.operands
    rows, columns, b_columns, b_rows = _places(2)
    matrix_a = np.zeros((len(warps), 16, 16), np.uint16)
    matrix_a[:, rows, columns] = _fragment(machine, file, a, 4, mask, warps, np.uint16)
    matrix_b = np.zeros((len(warps), 16, 8), np.uint16)
    matrix_b[:, b_rows, b_columns] = _fragment(machine, file, b, 2, mask, warps, np.uint16)
    start = _accumulator(machine, file, c, mask, warps)
    bits = 8 if "BF16" in modifiers else 11
    result = truncated_sum(
        _decode16(matrix_a, bits)[:, :, None, :],
        _decode16(matrix_b, bits).transpose(0, 2, 1)[:, None, :, :],
        start,
    )
    _write_result(machine, file, d, result, warps)


def _decode16(bits: NDArray[np.uint16], precision: int) -> NDArray[np.float64]:
    if precision == 8:
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return bits.view(np.float16).astype(np.float64)


def truncated_sum(
    a: NDArray[np.float64], b: NDArray[np.float64], c: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Sum products and an accumulator as Hopper's tensor cores do.

    Products are exact. All terms are aligned to the largest exponent, cut (towards zero) to
    `_ALIGNED_BITS` fraction bits below it, summed exactly, and the sum is cut to float32. A
    product's exponent is the sum of its factors', whatever the product of their fractions is.

    Args:
        a: [..., k] factors.
        b: [..., k] factors.
        c: [...] accumulators.

    Returns:
        float32 [...].
    """
    a, b = np.broadcast_arrays(a, b)
    with np.errstate(invalid="ignore", over="ignore"):
        products = a * b
        special = products.sum(axis=-1) + c
        exponents = _exponent(a) + _exponent(b)
        exponents = np.where(products == 0, -(10**6), exponents)
        own = np.where(c == 0, -(10**6), _exponent(c.astype(np.float64)))
        largest = np.maximum(exponents.max(axis=-1), own)
        largest = np.maximum(largest, -2000)
        unit = largest - _ALIGNED_BITS
        terms = np.trunc(np.ldexp(products, -unit[..., None])).sum(axis=-1)
        terms = terms + np.trunc(np.ldexp(c.astype(np.float64), -unit))
        exact = np.ldexp(terms, unit)
        result = exact.astype(np.float32)
        above = np.abs(result.astype(np.float64)) > np.abs(exact)
        result = np.where(above, np.nextafter(result, np.float32(0)), result)
    odd = ~np.isfinite(special)
    return np.where(odd, special.astype(np.float32), result).astype(np.float32)


def _exponent(value: NDArray[np.float64]) -> NDArray[np.int64]:
    """Exponent e of 1.f * 2^e."""
    _, exponent = np.frexp(value)
    return exponent.astype(np.int64) - 1


def _e4m3() -> NDArray[np.float64]:
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, code & 7
    normal = (1 + fraction / 8) * np.exp2(exponent - 7.0)
    value = np.where(exponent == 0, fraction / 8 * 2.0**-6, normal)
    return np.where(code & 127 == 127, np.nan, np.where(code & 128, -value, value))


def _e2m1() -> NDArray[np.float64]:
    """Values of bytes that hold a nibble in bits 2 to 5."""
    code = np.arange(256) >> 2 & 15
    value = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[code & 7]
    return np.where(code & 8, -value, value)


E4M3 = _e4m3()
"""Value of every e4m3 byte."""

_BYTES = {"E4M3": E4M3, "E2M1": _e2m1()}


def byte_product(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """QMMA[.SF].16832.F32.type.type[.E8] d, a, b, c, [scales of a, scales of b, selector].

    Exact products and sum, one rounding to float32 (to nearest even): the hardware's own rounding
    is not documented. The selector is `byte_a | thread_a << 2 | byte_b << 3 | thread_b << 5`: the
    byte of the scale register, and which lanes of a quad hold it (PTX ISA, mma block scaling): row
    g from lane 2 thread_a, row g + 8 from the next, column g from lane thread_b.
    """
    modifiers = statement.instruction.modifiers
    scaled = modifiers[0] == "SF"
    types = [m for m in modifiers if m in _BYTES]
    if len(types) != 2 or modifiers[scaled : 2 + scaled] != ("16832", "F32"):
        raise machine.unsupported(statement.instruction.mnemonic)
    warps = _whole_warps(machine, mask)
    d, a, b, c, *scale_operands = statement.instruction.operands
    rows, columns, b_columns, b_rows = _places(4)
    matrix_a = np.zeros((len(warps), 16, 32))
    codes = _fragment(machine, file, a, 4, mask, warps, np.uint8)
    matrix_a[:, rows, columns] = _BYTES[types[0]][codes]
    matrix_b = np.zeros((len(warps), 32, 8))
    codes = _fragment(machine, file, b, 2, mask, warps, np.uint8)
    matrix_b[:, b_rows, b_columns] = _BYTES[types[1]][codes]
    products = matrix_a @ matrix_b  # float64: 8 + 5 bits a product, exponents within 32: exact
    if scaled:
        products = products * _scales(machine, file, scale_operands, mask, warps)
    start = _accumulator(machine, file, c, mask, warps).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        result = (products + start).astype(np.float32)
    _write_result(machine, file, d, result, warps)


def _scales(
    machine: Machine, file: File, operands: list[Operand], mask: Mask, warps: NDArray
) -> NDArray[np.float64]:
    """The factor of every element of the product, [warps, 16, 8]."""
    selector = np.broadcast_to(raw(machine, file, operands[2], mask), machine.count)
    chosen = np.unique(selector.reshape(-1, WARP)[warps])
    if len(chosen) != 1:
        raise machine.unsupported("a scale selector that differs between warps")
    pick = int(chosen[0])
    byte_a, thread_a, byte_b, thread_b = pick & 3, pick >> 2 & 1, pick >> 3 & 3, pick >> 5 & 3
    exponents = []
    for operand, byte in zip(operands[:2], (byte_a, byte_b), strict=True):
        words = np.broadcast_to(raw(machine, file, operand, mask), machine.count)
        codes = words.reshape(-1, WARP)[warps] >> np.uint32(8 * byte) & np.uint32(255)
        exponents.append(np.where(codes == 255, np.nan, codes.astype(np.float64) - 127))
    quad = 4 * np.arange(8)
    rows = np.concatenate(
        [exponents[0][:, quad + 2 * thread_a], exponents[0][:, quad + 2 * thread_a + 1]], axis=1
    )
    columns = exponents[1][:, quad + thread_b]
    return np.exp2(rows[:, :, None] + columns[:, None, :])


def _whole_warps(machine: Machine, mask: Mask) -> NDArray[np.int64]:
    lanes = mask.reshape(-1, WARP)
    partly = lanes.any(axis=1) & ~lanes.all(axis=1)
    if partly.any():
        message = "a matrix instruction needs all 32 threads of its warp."
        raise machine.fail(Fault.UNINITIALISED, message, partly)
    return np.flatnonzero(lanes[:, 0])


def _fragment(
    machine: Machine,
    file: File,
    operand: Operand,
    registers: int,
    mask: Mask,
    warps: NDArray,
    kind: Any,
) -> NDArray:
    """Elements of an operand's registers, [warps, registers, 32, elements a register]."""
    parts = [
        np.broadcast_to(raw(machine, file, operand, mask, part), machine.count)
        for part in range(registers)
    ]
    words = np.stack(parts).reshape(registers, -1, WARP)[:, warps].transpose(1, 0, 2)
    return np.ascontiguousarray(words[..., None]).view(kind)


def _accumulator(
    machine: Machine, file: File, operand: Operand, mask: Mask, warps: NDArray
) -> NDArray[np.float32]:
    matrix = np.zeros((len(warps), 16, 8), np.float32)
    if operand.values[0] != file.zero:
        words = _fragment(machine, file, operand, 4, mask, warps, np.uint32)[..., 0]
        matrix[:, _C_ROWS, _C_COLUMNS] = words.view(np.float32)
    return matrix


def _write_result(
    machine: Machine, file: File, operand: Operand, result: NDArray, warps: NDArray
) -> None:
    words: Words = result.astype(np.float32).view(np.uint32)
    words = np.where(np.isnan(words.view(np.float32)), np.uint32(0x7FFFFFFF), words)
    write_words(machine, file, operand, words, warps)


def write_words(
    machine: Machine, file: File, operand: Operand, words: Words, warps: NDArray
) -> None:
    """Write a product of warps, [warps, 16, 8], to the four registers of an operand."""
    of_registers = words[:, _C_ROWS, _C_COLUMNS]
    spread = np.zeros((machine.warps, WARP), bool)
    spread[warps] = True
    for part in range(4):
        full = np.zeros((machine.warps, WARP), np.uint32)
        full[warps] = of_registers[:, part]
        machine.write(file, operand.values[0] + part, full.reshape(-1), spread.reshape(-1))


OPERATIONS: dict[str, Operation] = {"HMMA": half_product, "QMMA": byte_product}
