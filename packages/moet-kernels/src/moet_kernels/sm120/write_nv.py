"""The loop of the fp4-nv kernels: e2m1 weights with an e4m3 scale per 16 columns.

The block-scaled QMMA takes power-of-two scales of 32 columns, so each half of a step is a product
of its own, the other half of A being zero, and its float32 result is multiplied by the scale of its
row. Registers, where they differ from `write`: R4..R11 code words of both row blocks, R12..R15 the
vector, R16..R19 scales of rows g and g + 8 of both row blocks, R32..R35 and R36..R39 the halves of
A, R40..R47 their products, R20, R21 two scales as float32, R49 the neutral scale of A.
"""

from collections.abc import Iterator

__all__ = ["from_e4m3", "nv_constants", "nv_factors", "nv_loop"]

_LOW_HALF, _HIGH_HALF = 32, 36
_PRODUCTS = (40, 44)


def nv_constants() -> Iterator[str]:
    """What stays in registers: zeros in the halves of A, and 2^0 four times."""
    yield "  MOV R49, 0x7f7f7f7f"
    yield "  CS2R R34, SRZ"
    yield "  CS2R R36, SRZ"
    yield from (f"  CS2R R{register}, SRZ" for register in (12, 14))


def nv_loop(steps: int) -> Iterator[str]:
    """Blocks of 32 * steps columns, 64 at a time."""
    narrow = "" if steps == 4 else ".U16"
    yield f"  @!P1 LDG.E{narrow}.CONSTANT R22, desc[UR8][R2.64]"
    for part in range(steps // 2):
        codes = f"+{512 * part:#x}" if part else ""
        vector = f"+{16 * part:#x}" if part else ""
        for row_block in range(2):
            where = f"desc[UR8][R{52 + 2 * row_block}.64{codes}]"
            yield f"  LDG.E.NA.LTC128B.128.CONSTANT R{4 + 4 * row_block}, {where}"
            for row in range(2):
                distance = 4 * part + 16 * steps * row
                place = f"+{distance:#x}" if distance else ""
                register, pointer = 16 + 2 * row_block + row, 56 + 2 * row_block
                yield f"  LDG.E.CONSTANT R{register}, desc[UR8][R{pointer}.64{place}]"
        yield f"  @!P1 LDG.E.128.CONSTANT R12, desc[UR8][R60.64{vector}]"
        if part == 0:
            yield "  IADD R0, R0, 0x4"
            yield "  ISETP.GE.U32.AND P2, PT, R0, UR11, PT"
        for step in range(2):
            byte = ("UR15", "UR12", "UR13", "UR14")[2 * part + step]
            for row_block in range(2):
                yield from _step(step, row_block, byte)
    stride_of_codes = 1024 * steps
    others = ((56, 128 * steps), (58, 128 * steps), (60, 128 * steps), (2, 4 * steps))
    for register, stride in ((52, stride_of_codes), (54, stride_of_codes), *others):
        yield f"  IADD.64 R{register}, R{register}, {stride:#x}"
    yield "  @!P2 BRA loop"


def _step(step: int, row_block: int, byte: str) -> Iterator[str]:
    """A step of a row block: two products, then both into the sums, in this order."""
    word, vector = 4 + 4 * row_block + 2 * step, 12 + 2 * step
    for half, first in enumerate((_LOW_HALF, _HIGH_HALF + 2)):
        yield f"  SHF.L.U32 R{first}, R{word + half}, 0x2, RZ"
        yield f"  SHF.R.U32.HI R{first + 1}, RZ, 0x2, R{word + half}"
        yield f"  LOP3.LUT R{first}, R{first}, 0x3c3c3c3c, RZ, 0xc0, !PT"
        yield f"  LOP3.LUT R{first + 1}, R{first + 1}, 0x3c3c3c3c, RZ, 0xc0, !PT"
    for product in _PRODUCTS:
        yield f"  CS2R R{product}, SRZ"
        yield f"  CS2R R{product + 2}, SRZ"
    for product, a in zip(_PRODUCTS, (_LOW_HALF, _HIGH_HALF), strict=True):
        operands = f"R{product}, R{a}, R{vector}, R{product}, R49, R22, {byte}"
        yield f"  QMMA.SF.16832.F32.E2M1.E4M3.E8 {operands}"
    sums, scales = 24 + 4 * row_block, 16 + 2 * row_block
    for half, product in enumerate(_PRODUCTS):
        for row in range(2):
            yield from from_e4m3(20 + row, scales + row, 2 * step + half)
        for i in range(4):
            yield f"  FFMA R{sums + i}, R{product + i}, R{20 + i // 2}, R{sums + i}"


def from_e4m3(target: int, word: int, place: int) -> Iterator[str]:
    """Byte `place` of a word as float32: its bits at their places are the value times 2^-120."""
    source = word
    if place < 3:
        yield f"  SHF.L.U32 R{target}, R{word}, {24 - 8 * place:#x}, RZ"
        source = target
    yield f"  SHF.R.S32.HI R{target}, RZ, 0x4, R{source}"
    yield f"  LOP3.LUT R{target}, R{target}, 0x87f00000, RZ, 0xc0, !PT"
    yield f"  FMUL R{target}, R{target}, 1.32922799578491587e+36"


def nv_factors(*, down: bool) -> tuple[list[str], list[str]]:
    """Load the tensor scales into R10 and R11, and multiply the sums R16 and R20 by them."""
    at = 0x3B0 if down else 0x3C0
    size, place, second = ("", "+0x8", 10) if down else (".64", "", 11)
    load = [
        "  LDG.E.64.CONSTANT R10, desc[UR8][R50.64]",
        f"  LDC R14, c[0x0][{at:#x}]",
        "  IMAD.WIDE.U32 R10, R14, 0x1, R10",
        f"  LDG.E{size}.CONSTANT R10, desc[UR8][R10.64{place}]",
    ]
    return load, ["  FMUL R16, R16, R10", f"  FMUL R20, R20, R{second}"]
