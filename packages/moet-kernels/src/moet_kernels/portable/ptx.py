"""Decoding of plane words into pairs of bfloat16: PTX, because no Triton operation is a PRMT.

A fragment word holds the weights of one lane in `moet_core.layout`'s order. Every snippet gives
32-bit registers of two bfloat16, the lower column in the low half, in the order (half, tile,
pair), without `half` where a word holds only one. Values are half of what the codes say, and
scales twice of what their bytes say (`weights`): the product is the same and the smallest scale,
2^-127, is then a normal float32.

- w2: halved levels have a zero low byte in bfloat16, so a PRMT looks four high bytes up and two
  more spread them. Pairs are (j0, j1), (j2, j3).
- fp4: sign and magnitude of a nibble move to bits 15 and 8..6. That is the bfloat16 of the value
  times 2^-126, subnormals included; one exact multiplication by 2^125 follows. Nibbles of j and
  j + 2 are 16 bits apart, so the pairs are (j0, j2), (j1, j3).

`*_SCALED` snippets also multiply by a bfloat16 scale for each tile, exactly.
"""

import triton.language as tl

__all__ = [
    "FP4",
    "FP4_CONSTRAINTS",
    "FP4_SCALED",
    "FP4_SCALED_CONSTRAINTS",
    "W2",
    "W2_CONSTRAINTS",
    "W2_LEVELS",
    "W2_SCALED",
    "W2_SCALED_CONSTRAINTS",
]

W2_LEVELS = 0x403FBFC0
"""High bytes of bfloat16 -2, -0.5, 0.5, 2 for codes 0..3, from the lowest byte.

Kernels get it as an argument: the compiler would load a constant anew for every PRMT.
"""

_SPREAD = (0x1404, 0x3424)
"""PRMT selectors: bytes 0, 1 (then 2, 3) of the first source above zero bytes of the second."""

_TO_HALF_VALUE = 0x7E007E00
"""Two bfloat16 of 2^125."""

_MINUS_ZERO = 0x80008000
"""The addend that makes a fused multiply-add a multiplication, for sm_80 has no plain one."""


def _w2(word: str, table: str, results: list[str]) -> str:
    lines = [
        ".reg .b32 a, b, c, d, p;",
        f"and.b32 a, {word}, 0x33333333;",
        f"shr.u32 b, {word}, 2;",
        "and.b32 b, b, 0x33333333;",
        "shr.u32 c, a, 16;",
        "shr.u32 d, b, 16;",
    ]
    for register, selector in enumerate("abcd"):
        lines.append(f"prmt.b32 p, {table}, 0, {selector};")
        lines += [
            f"prmt.b32 {results[2 * register + pair]}, p, 0, {_SPREAD[pair]:#06x};"
            for pair in range(2)
        ]
    return "\n".join(lines)


_FP4_SHIFTS = ((-12, -6), (-4, 2), (-8, -2), (0, 6))
"""For (tile, pair): right shifts that bring a nibble's sign to bit 15, magnitude to bits 8..6."""


def _fp4(word: str, results: list[str]) -> str:
    lines = [
        ".reg .b32 s, m, big, none;",
        f"mov.b32 big, {_TO_HALF_VALUE:#010x};",
        f"mov.b32 none, {_MINUS_ZERO:#010x};",
    ]
    for result, shifts in zip(results, _FP4_SHIFTS, strict=True):
        for register, shift in zip("sm", shifts, strict=True):
            operation = "shr.u32" if shift >= 0 else "shl.b32"
            lines.append(f"{operation} {register}, {word}, {abs(shift)};")
        lines += [
            "and.b32 s, s, 0x80008000;",
            "and.b32 m, m, 0x01c001c0;",
            "or.b32 s, s, m;",
            f"fma.rn.bf16x2 {result}, s, big, none;",
        ]
    return "\n".join(lines)


def _scaled(decode: str, results: list[str], scales: list[str]) -> str:
    """Multiply results of (tile, pair) or (half, tile, pair) by the scale of their tile."""
    lines = [".reg .b32 minus;", f"mov.b32 minus, {_MINUS_ZERO:#010x};"]
    for place, result in enumerate(results):
        lines.append(f"fma.rn.bf16x2 {result}, {result}, {scales[place >> 1 & 1]}, minus;")
    return "\n".join([decode, *lines])


def _registers(first: int, count: int) -> list[str]:
    return [f"${first + i}" for i in range(count)]


def _snippet(body: str) -> tl.constexpr:
    return tl.constexpr("{\n" + body + "\n}")


def _constraints(outputs: int, inputs: int) -> tl.constexpr:
    # Early clobber: a result may be written before the last input is read.
    return tl.constexpr(",".join(["=&r"] * outputs + ["r"] * inputs))


W2 = _snippet(_w2("$8", "$9", _registers(0, 8)))
W2_CONSTRAINTS = _constraints(8, 2)
W2_SCALED = _snippet(_scaled(_w2("$8", "$9", _registers(0, 8)), _registers(0, 8), ["$10", "$11"]))
W2_SCALED_CONSTRAINTS = _constraints(8, 4)
FP4 = _snippet(_fp4("$4", _registers(0, 4)))
FP4_CONSTRAINTS = _constraints(4, 1)
FP4_SCALED = _snippet(_scaled(_fp4("$4", _registers(0, 4)), _registers(0, 4), ["$5", "$6"]))
FP4_SCALED_CONSTRAINTS = _constraints(4, 3)
