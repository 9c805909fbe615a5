"""What the w2 kernels with bfloat16 vectors have of their own: addresses, loop, and the last store.

A step of 32 columns is two HMMAs of 16, of -4, -1, 1, 4 and the vector as it is, added up from
zero; float32 FFMAs multiply by the row's scale. A lane's four columns of a half, 4 t to 4 t + 3,
stand for columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of the instruction, in both of its operands.

Registers, where they differ from `write`: R2, R3 and R20, R21 scales of rows g and g + 8 of the
second and the first row block, R12..R19 the vector's words of two steps, R22 the smallest scale,
R32..R39 fragments of A of a step, R40..R43 its products, R44, R45 selectors, R46, R47 two scales as
float32, R48, R49 high and low bytes of the levels, R60:61 address of the vector.
"""

from collections.abc import Iterator

__all__ = ["BF16_STORE", "bf16_addresses", "bf16_loop"]

BF16_STORE = """\
  F2FP.BF16.F32.PACK_AB R7, RZ, R16
  SHF.L.U32 R8, R14, 0x5, RZ
  IADD R20, R8, R5
  MOV R21, RZ
  IMAD.WIDE.U32 R20, R9, UR7, R20
  LEA R12, P2, R20, R26, 0x1
  LEA.HI.X R13, R20, R27, R21, 0x1, P2
  STG.E.U16 desc[UR8][R12.64], R7
  EXIT
"""
"""Store the activated values, column `lane` of the tile each."""

_SCALES = ((20, 56), (2, 58))
"""Of both row blocks: register of row g's scales, the next being row g + 8's, and their address."""


def bf16_addresses(steps: int) -> Iterator[str]:
    """R56:57, R58:59, R60:61 and constants; R16 block of both, R13 column block, R12 vector."""
    yield "  LEA R18, R16, R10, 0x4"
    yield "  SHF.R.U32.HI R42, RZ, 0x1, R42"
    yield f"  IMAD.WIDE.U32 R56, R18, {steps:#x}, R40"
    yield "  IMAD.WIDE.U32 R58, R42, 0x1, R56  // a row block has K / 2 of them"
    yield "  LDC.64 R60, c[0x0][0x388]"
    yield "  MOV R0, R13"
    yield "  @P1 MOV R12, RZ"
    yield "  USHF.L.U32 UR5, UR6, 0x1, URZ"
    yield "  IMAD.WIDE.U32 R60, R12, UR5, R60"
    yield f"  IMAD.WIDE.U32 R60, R13, {64 * steps:#x}, R60"
    yield "  IMAD.WIDE.U32 R60, R11, 0x8, R60"
    yield "  MOV R48, 0x403fbfc0  // high bytes of bf16 -4, -1, 1, 4"
    yield "  MOV R49, 0x80808080  // their low bytes"
    yield "  MOV R22, 0x400000  // 2^-127"
    yield from (f"  CS2R R{register}, SRZ" for register in range(12, 20, 2))


def bf16_loop(steps: int) -> Iterator[str]:
    """Blocks of 32 * steps columns; the vector's words come two steps ahead."""
    narrow = "" if steps == 4 else ".U16"
    wide = "NA.LTC128B.128" if steps == 4 else "64"
    for row_block in range(2):
        where = f"desc[UR8][R{52 + 2 * row_block}.64]"
        yield f"  LDG.E.{wide}.CONSTANT R{4 + 4 * row_block}, {where}"
    for register, pointer in _SCALES:
        for row in range(2):
            where = f"desc[UR8][R{pointer}.64{_offset(8 * steps * row)}]"
            yield f"  LDG.E{narrow}.CONSTANT R{register + row}, {where}"
    yield from _load_vector(0)
    yield from _load_vector(1)
    yield "  IADD R0, R0, 0x4"
    yield "  ISETP.GE.U32.AND P2, PT, R0, UR11, PT"
    before: list[str] = []
    for step in range(steps):
        for row_block in range(2):
            vector = 12 + 4 * (step % 2)
            yield from _first_half(4 + 4 * row_block + step)
            yield from before  # products need as long as it takes to make the next fragments
            yield "  CS2R R40, SRZ"
            yield "  CS2R R42, SRZ"
            yield f"  HMMA.16816.F32.BF16 R40, R32, R{vector}, R40"
            yield from _second_half()
            yield f"  HMMA.16816.F32.BF16 R40, R36, R{vector + 2}, R40"
            before = [*_scaled(step, row_block)]
        if step + 2 < steps:
            yield from _load_vector(step + 2)
    others = ((56, 64 * steps), (58, 64 * steps), (60, 256 * steps))
    for register, stride in ((52, 512 * steps), (54, 512 * steps), *others):
        yield f"  IADD.64 R{register}, R{register}, {stride:#x}"
    yield from before
    yield "  @!P2 BRA loop"


def _load_vector(step: int) -> Iterator[str]:
    """Words of a step: four columns of each half of it."""
    for half in range(2):
        where = f"desc[UR8][R60.64{_offset(64 * step + 32 * half)}]"
        yield f"  @!P1 LDG.E.64.CONSTANT R{12 + 4 * (step % 2) + 2 * half}, {where}"


def _first_half(word: int) -> Iterator[str]:
    """A's registers of 16 columns, and the selectors of all 32: fields select high bytes.

    Even fields are row g, odd ones row g + 8; the low half word is the first 16 columns.
    """
    yield f"  LOP3.LUT R44, R{word}, 0x33333333, RZ, 0xc0, !PT"
    yield f"  SHF.R.U32.HI R45, RZ, 0x2, R{word}"
    yield "  LOP3.LUT R45, R45, 0x33333333, RZ, 0xc0, !PT"
    yield from _fragments(32)


def _second_half() -> Iterator[str]:
    yield "  SHF.R.U32.HI R44, RZ, 0x10, R44"
    yield "  SHF.R.U32.HI R45, RZ, 0x10, R45"
    yield from _fragments(36)


def _fragments(a: int) -> Iterator[str]:
    yield f"  PRMT R{a}, R48, R44, RZ"
    yield f"  PRMT R{a + 1}, R48, R45, RZ"
    for target, source, select in ((2, 0, 0x3424), (3, 1, 0x3424), (0, 0, 0x1404), (1, 1, 0x1404)):
        yield f"  PRMT R{a + target}, R{a + source}, {select:#x}, R49"


def _scaled(step: int, row_block: int) -> Iterator[str]:
    """Add the products of a step times its scales to the sums; byte 0 is the subnormal 2^-127."""
    scales, sums = _SCALES[row_block][0], 24 + 4 * row_block
    shift = 23 - 8 * step
    for row in range(2):
        source, target = scales + row, 46 + row
        if shift >= 0:
            yield f"  SHF.L.U32 R{target}, R{source}, {shift:#x}, RZ"
        else:
            yield f"  SHF.R.U32.HI R{target}, RZ, {-shift:#x}, R{source}"
        yield f"  LOP3.LUT R{target}, R{target}, 0x7f800000, RZ, 0xc0, !PT"
        yield f"  VIMNMX.U32 R{target}, R{target}, R22, !PT"
    for i in range(4):
        yield f"  FFMA R{sums + i}, R{40 + i}, R{46 + i // 2}, R{sums + i}"


def _offset(distance: int) -> str:
    return f"+{distance:#x}" if distance else ""
