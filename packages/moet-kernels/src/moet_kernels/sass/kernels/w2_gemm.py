"""Writes w2_gemm_bf16.sass (sm_90a) and w2_gemm_e4m3.sass (sm_120a).

Both do what their twins do, step for step: one block of 4 warps computes 16 rows of W times 8
tokens; warp w takes blocks w, w + 4, ... of 128 columns; the partial sums meet in shared memory.
What differs is how constants are read, how addresses advance, and the decode with its MMA.

Registers of both: R0 thread, R2 block x, R3 block y, R4 warp and then column block, R5 lane,
R6 g, R7 t, R8 token, R12 codes, R14 scales, R18 x, R20..R23 code words, R24, R25 scales,
R32..R35 sums, R36 levels, R40.. fragments of x. P1: no such token.
"""

from collections.abc import Iterator

__all__ = ["SOURCES", "bf16_source", "e4m3_source"]

_INDEX = """\
  SHF.R.U32.HI R4, RZ, 0x5, R0
  LOP3.LUT R5, R0, 0x1f, RZ, 0xc0, !PT
  SHF.R.U32.HI R6, RZ, 0x2, R5
  LOP3.LUT R7, R0, 0x3, RZ, 0xc0, !PT
  LEA R8, R3, R6, 0x3
  CS2R R32, SRZ
  CS2R R34, SRZ
  ISETP.GE.AND P1, PT, R8, UR10, PT
  ISETP.GE.AND P0, PT, R4, UR7, PT
  @P0 BRA reduce
  IMAD R9, R2, UR7, R4
  LEA R10, R9, R5, 0x5
  IMAD.WIDE R12, R10, 0x10, R12
  IMAD R16, R8, UR5, R7
  LEA R16, R4, R16, 0x5
"""
_REDUCE = """\
reduce:
  SHF.R.U32.HI R4, RZ, 0x5, R0
  S2UR UR5, SR_CgaCtaId
  UMOV UR4, 0x400
  ULEA UR4, UR5, UR4, 0x18
  LEA R9, R4, UR4, 0x9
  LEA R9, R5, R9, 0x2
  LEA R10, R4, UR4, 0x7
  LEA R10, R5, R10, 0x2
  STS [R9], R32
  STS [R9+0x80], R33
  STS [R9+0x100], R34
  STS [R9+0x180], R35
  BAR.SYNC.DEFER_BLOCKING 0x0
  // Warp r adds up register r of the four warps: column 2 t + (r & 1), row g + 8 (r >> 1).
  LDS R20, [R10]
  LDS R21, [R10+0x200]
  LDS R22, [R10+0x400]
  LDS R23, [R10+0x600]
  LOP3.LUT R13, R4, 0x1, RZ, 0xc0, !PT
  LEA R13, R7, R13, 0x1
  LEA R13, R3, R13, 0x3
  SHF.R.U32.HI R14, RZ, 0x1, R4
  LEA R14, R14, R6, 0x3
  LEA R14, R2, R14, 0x4
  ISETP.GE.AND P0, PT, R13, UR10, PT
  @P0 EXIT
  IMAD R15, R13, UR11, R14
  IMAD.WIDE R16, R15, 0x4, R26
  FADD R20, R20, R21
  FADD R20, R20, R22
  FADD R20, R20, R23
  STG.E desc[UR8][R16.64], R20
  EXIT
"""


def bf16_source() -> str:
    """W2 times bf16 activations with HMMA, for sm_90a."""
    return "\n".join(_bf16_lines()) + "\n"


def _bf16_lines() -> Iterator[str]:
    yield from _header("sm_90a", "w2_gemm_bf16", 96, 44)
    yield "  ULDC UR6, c[0x0][0x238]"
    yield "  ULDC UR10, c[0x0][0x230]"
    yield "  ULDC UR11, c[0x0][0x234]"
    yield "  ULDC.64 UR8, c[0x0][0x208]"
    yield "  LDC.64 R12, c[0x0][0x220]"
    yield "  LDC.64 R14, c[0x0][0x228]"
    yield "  LDC.64 R18, c[0x0][0x218]"
    yield "  LDC.64 R26, c[0x0][0x210]"
    yield "  USHF.R.S32.HI UR7, URZ, 0x7, UR6"
    yield "  USHF.R.S32.HI UR5, URZ, 0x2, UR6"
    yield from _INDEX.splitlines()
    yield "  LEA R11, R9, R6, 0x4"
    yield "  IMAD.WIDE R14, R11, 0x4, R14"
    yield "  IMAD.WIDE R18, R16, 0x8, R18"
    yield "  MOV R36, 0x403fbfc0  // high bytes of bf16 -4, -1, 1, 4"
    yield "  MOV R37, 0x80808080  // their low bytes"
    yield from (f"  CS2R R{r}, SRZ" for r in range(40, 56, 2))
    yield "loop:"
    yield "  LDG.E.128.CONSTANT R20, desc[UR8][R12.64]"
    yield "  LDG.E.CONSTANT R24, desc[UR8][R14.64]"
    yield "  LDG.E.CONSTANT R25, desc[UR8][R14.64+0x20]"
    for i in range(8):
        yield f"  @!P1 LDG.E.64.CONSTANT R{40 + 2 * i}, desc[UR8][R18.64{_offset(32 * i)}]"
    for first in (0, 2):
        yield from _decode_bf16(first, 56)
        yield from _decode_bf16(first + 1, 64)
        for half in range(2):
            for step in (first, first + 1):
                a, b, c = (
                    56 + 8 * (step - first) + 4 * half,
                    40 + 4 * step + 2 * half,
                    72 + 4 * step,
                )
                start = f"R{c}" if half else "RZ"
                yield f"  HMMA.16816.F32.BF16 R{c}, R{a}, R{b}, {start}"
    for register, stride in ((12, 0x800), (14, 0x100), (18, 0x400)):
        yield f"  IADD3 R{register}, P2, R{register}, {stride:#x}, RZ"
        yield f"  IADD3.X R{register + 1}, R{register + 1}, RZ, RZ, P2, !PT"
    yield "  IADD3 R4, R4, 0x4, RZ"
    yield "  ISETP.GE.AND P2, PT, R4, UR7, PT"
    for step in range(4):
        for row in range(2):
            yield from _power_of_two(88 + 2 * step + row, 24 + row, step)
    for step in range(4):
        for i in range(4):
            yield f"  FFMA R{32 + i}, R{72 + 4 * step + i}, R{88 + 2 * step + i // 2}, R{32 + i}"
    yield "  @!P2 BRA loop"
    yield from _REDUCE.splitlines()


def _decode_bf16(step: int, a: int) -> Iterator[str]:
    """The eight registers of A of one step: the code word's selectors pick high bytes."""
    word = 20 + step
    yield f"  LOP3.LUT R28, R{word}, 0x33333333, RZ, 0xc0, !PT"
    yield f"  SHF.R.U32.HI R29, RZ, 0x2, R{word}"
    yield "  LOP3.LUT R29, R29, 0x33333333, RZ, 0xc0, !PT"
    yield "  SHF.R.U32.HI R30, RZ, 0x10, R28"
    yield "  SHF.R.U32.HI R31, RZ, 0x10, R29"
    for half, (even, odd) in enumerate(((28, 29), (30, 31))):
        yield f"  PRMT R38, R36, R{even}, RZ"
        yield f"  PRMT R39, R36, R{odd}, RZ"
        for i, select in enumerate((0x1404, 0x1404, 0x3424, 0x3424)):
            yield f"  PRMT R{a + 4 * half + i}, R{38 + i % 2}, {select:#x}, R37"


def _power_of_two(target: int, source: int, step: int) -> Iterator[str]:
    """Byte `step` of a scale word as float32; byte 0 is the subnormal 2^-127."""
    shift = 23 - 8 * step
    if shift >= 0:
        yield f"  SHF.L.U32 R{target}, R{source}, {shift:#x}, RZ"
    else:
        yield f"  SHF.R.U32.HI R{target}, RZ, {-shift:#x}, R{source}"
    yield f"  LOP3.LUT R{target}, R{target}, 0x7f800000, RZ, 0xc0, !PT"
    yield f"  ISETP.NE.AND P0, PT, R{target}, RZ, PT"
    yield f"  SEL R{target}, R{target}, 0x400000, P0"


def e4m3_source() -> str:
    """W2 times e4m3 activations with block-scaled QMMA, for sm_120a."""
    return "\n".join(_e4m3_lines()) + "\n"


def _e4m3_lines() -> Iterator[str]:
    yield from _header("sm_120a", "w2_gemm_e4m3", 56, 52)
    yield "  LDCU UR6, c[0x0][0x3b0]"
    yield "  LDCU UR10, c[0x0][0x3a8]"
    yield "  LDCU UR11, c[0x0][0x3ac]"
    yield "  LDCU.64 UR8, c[0x0][0x358]"
    yield "  LDC.64 R12, c[0x0][0x398]"
    yield "  LDC.64 R14, c[0x0][0x3a0]"
    yield "  LDC.64 R18, c[0x0][0x388]"
    yield "  LDC.64 R28, c[0x0][0x390]"
    yield "  LDC.64 R26, c[0x0][0x380]"
    yield "  USHF.R.S32.HI UR7, URZ, 0x7, UR6"
    yield "  USHF.R.S32.HI UR5, URZ, 0x2, UR6"
    yield "  UMOV UR12, 0x9  // byte 1 of both scale words, and so on"
    yield "  UMOV UR13, 0x12"
    yield "  UMOV UR14, 0x1b"
    yield from _INDEX.splitlines()
    yield "  // Scales of rows g and g + 8 lie in lanes t = 0 and 1 (and, unused, 2 and 3)."
    yield "  LOP3.LUT R11, R7, 0x1, RZ, 0xc0, !PT"
    yield "  LEA R11, R11, R6, 0x3"
    yield "  LEA R11, R9, R11, 0x4"
    yield "  IMAD.WIDE R14, R11, 0x4, R14"
    yield "  IMAD.WIDE R18, R16, 0x4, R18"
    yield "  IMAD R17, R8, UR7, R4"
    yield "  IMAD.WIDE R28, R17, 0x4, R28"
    yield "  MOV R36, 0x4838b8c8  // e4m3 -4, -1, 1, 4"
    yield "  MOV R25, RZ"
    yield from (f"  CS2R R{r}, SRZ" for r in range(40, 48, 2))
    yield "loop:"
    yield "  LDG.E.128.CONSTANT R20, desc[UR8][R12.64]"
    yield "  LDG.E.CONSTANT R24, desc[UR8][R14.64]"
    yield "  @!P1 LDG.E.CONSTANT R25, desc[UR8][R28.64]"
    for i in range(8):
        yield f"  @!P1 LDG.E.CONSTANT R{40 + i}, desc[UR8][R18.64{_offset(16 * i)}]"
    for step in range(4):
        yield from _decode_e4m3(step, 48 + 4 * (step % 2))
        yield (
            f"  QMMA.SF.16832.F32.E4M3.E4M3.E8 R32, R{48 + 4 * (step % 2)}, R{40 + 2 * step}, R32, "
            f"R24, R25, {('URZ', 'UR12', 'UR13', 'UR14')[step]}"
        )
    for register, stride in ((12, 0x800), (14, 0x100), (18, 0x200), (28, 0x10)):
        yield f"  IADD.64 R{register}, R{register}, {stride:#x}"
    yield "  IADD R4, R4, 0x4"
    yield "  ISETP.GE.AND P2, PT, R4, UR7, PT"
    yield "  @!P2 BRA loop"
    yield "  NOP  // the last sums need as long as two of the longest stalls"
    yield "  NOP"
    yield from _REDUCE.splitlines()


def _decode_e4m3(step: int, a: int) -> Iterator[str]:
    """The four registers of A of one step: the code word is four sets of byte selectors."""
    word = 20 + step
    yield f"  LOP3.LUT R30, R{word}, 0x33333333, RZ, 0xc0, !PT"
    yield f"  SHF.R.U32.HI R31, RZ, 0x2, R{word}"
    yield "  LOP3.LUT R31, R31, 0x33333333, RZ, 0xc0, !PT"
    yield "  SHF.R.U32.HI R38, RZ, 0x10, R30"
    yield "  SHF.R.U32.HI R39, RZ, 0x10, R31"
    for i, select in enumerate((30, 31, 38, 39)):
        yield f"  PRMT R{a + i}, R36, R{select}, RZ"


def _header(arch: str, name: str, registers: int, parameters: int) -> Iterator[str]:
    yield "// Written by w2_gemm.py, which explains it; change that instead."
    yield f".arch {arch}"
    yield f".kernel {name}"
    yield f".twin {name}.cu"
    yield f".registers {registers}"
    yield ".shared 2048"
    yield f".parameters {parameters}"
    stack = {"sm_90a": 0x28, "sm_120a": 0x37C}[arch]
    yield f"  LDC R1, c[0x0][{stack:#x}]"
    yield "  S2R R0, SR_TID.X"
    yield "  S2R R2, SR_CTAID.X"
    yield "  S2R R3, SR_CTAID.Y"


def _offset(byte: int) -> str:
    return f"+{byte:#x}" if byte else ""


SOURCES = {"w2_gemm_bf16": bf16_source, "w2_gemm_e4m3": e4m3_source}
