"""Writes w2_gemm_bf16.sass (sm_90a) and w2_gemm_e4m3.sass (sm_120a).

Both do what their twins do, step for step: one block of 4 warps computes 16 rows of W times 8
tokens; warp w takes blocks w, w + 4, ... of 128 columns; the partial sums meet in shared memory.
What differs is how constants are read, how addresses advance, and the decode with its MMA.

Registers of both: R0 thread, R2 block x, R3 block y, R4 warp and then column block, R5 lane,
R6 g, R7 t, R8 token, R12 codes, R14 scales, R18 x, R20..R23 code words, R24, R25 scales,
R32..R35 sums, R36 levels, R40.. fragments of x. P1: no such token.
"""

from collections.abc import Iterable, Iterator

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


_BF16_START = """\
  ULDC UR6, c[0x0][0x238]
  ULDC UR10, c[0x0][0x230]
  ULDC UR11, c[0x0][0x234]
  ULDC.64 UR8, c[0x0][0x208]
  LDC.64 R12, c[0x0][0x220]
  LDC.64 R14, c[0x0][0x228]
  LDC.64 R18, c[0x0][0x218]
  LDC.64 R26, c[0x0][0x210]
  USHF.R.S32.HI UR7, URZ, 0x7, UR6
  USHF.R.S32.HI UR5, URZ, 0x2, UR6
"""
_BF16_POINTERS = """\
  LEA R11, R9, R6, 0x4
  IMAD.WIDE R14, R11, 0x4, R14
  IMAD.WIDE R18, R16, 0x8, R18
  MOV R36, 0x403fbfc0  // high bytes of bf16 -4, -1, 1, 4
  MOV R37, 0x80808080  // their low bytes
"""
_E4M3_START = """\
  LDCU UR6, c[0x0][0x3b0]
  LDCU UR10, c[0x0][0x3a8]
  LDCU UR11, c[0x0][0x3ac]
  LDCU.64 UR8, c[0x0][0x358]
  LDC.64 R12, c[0x0][0x398]
  LDC.64 R14, c[0x0][0x3a0]
  LDC.64 R18, c[0x0][0x388]
  LDC.64 R28, c[0x0][0x390]
  LDC.64 R26, c[0x0][0x380]
  USHF.R.S32.HI UR7, URZ, 0x7, UR6
  USHF.R.S32.HI UR5, URZ, 0x2, UR6
  UMOV UR12, 0x9  // byte 1 of both scale words, and so on
  UMOV UR13, 0x12
  UMOV UR14, 0x1b
"""
_E4M3_POINTERS = """\
  // Scales of rows g and g + 8 lie in lanes t = 0 and 1 (and, unused, 2 and 3).
  LOP3.LUT R11, R7, 0x1, RZ, 0xc0, !PT
  LEA R11, R11, R6, 0x3
  LEA R11, R9, R11, 0x4
  IMAD.WIDE R14, R11, 0x4, R14
  IMAD.WIDE R18, R16, 0x4, R18
  IMAD R17, R8, UR7, R4
  IMAD.WIDE R28, R17, 0x4, R28
  MOV R36, 0x4838b8c8  // e4m3 -4, -1, 1, 4
  MOV R25, RZ
"""
_E4M3_END = """\
  IADD R4, R4, 0x4
  ISETP.GE.AND P2, PT, R4, UR7, PT
  @!P2 BRA loop
  NOP  // the last sums need as long as two of the longest stalls
  NOP
"""


def bf16_source() -> str:
    """W2 times bf16 activations with HMMA, for sm_90a."""
    start = _header("sm_90a", "w2_gemm_bf16", 96, 44) + _BF16_START + _INDEX + _BF16_POINTERS
    return start + _lines(_bf16_loop()) + _REDUCE


def _bf16_loop() -> Iterator[str]:
    yield from _zeros(range(40, 56, 2))
    yield "loop:"
    yield from _load("128", 20, 12)
    yield from _load("", 24, 14)
    yield from _load("", 25, 14, 0x20)
    for i in range(8):
        yield from _load("64", 40 + 2 * i, 18, 32 * i, guard="@!P1 ")
    for first in (0, 2):
        yield from _decode_bf16(first, 56)
        yield from _decode_bf16(first + 1, 64)
        for half in range(2):
            for step in (first, first + 1):
                a, b = 56 + 8 * (step - first) + 4 * half, 40 + 4 * step + 2 * half
                c = 72 + 4 * step
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


def _decode_bf16(step: int, a: int) -> Iterator[str]:
    """The eight registers of A of one step: the code word's selectors pick high bytes."""
    yield from _selectors(20 + step, 28, 29, 30, 31)
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
    start = _header("sm_120a", "w2_gemm_e4m3", 56, 52) + _E4M3_START + _INDEX + _E4M3_POINTERS
    return start + _lines(_e4m3_loop()) + _E4M3_END + _REDUCE


def _e4m3_loop() -> Iterator[str]:
    yield from _zeros(range(40, 48, 2))
    yield "loop:"
    yield from _load("128", 20, 12)
    yield from _load("", 24, 14)
    yield from _load("", 25, 28, guard="@!P1 ")
    for i in range(8):
        yield from _load("", 40 + i, 18, 16 * i, guard="@!P1 ")
    for step, byte in enumerate(("URZ", "UR12", "UR13", "UR14")):
        a = 48 + 4 * (step % 2)
        yield from _selectors(20 + step, 30, 31, 38, 39)
        for i, select in enumerate((30, 31, 38, 39)):
            yield f"  PRMT R{a + i}, R36, R{select}, RZ"
        operands = f"R32, R{a}, R{40 + 2 * step}, R32, R24, R25, {byte}"
        yield f"  QMMA.SF.16832.F32.E4M3.E4M3.E8 {operands}"
    for register, stride in ((12, 0x800), (14, 0x100), (18, 0x200), (28, 0x10)):
        yield f"  IADD.64 R{register}, R{register}, {stride:#x}"


def _selectors(word: int, even: int, odd: int, even_high: int, odd_high: int) -> Iterator[str]:
    """The four sets of four byte selectors of a code word, each in the low half of a register."""
    yield f"  LOP3.LUT R{even}, R{word}, 0x33333333, RZ, 0xc0, !PT"
    yield f"  SHF.R.U32.HI R{odd}, RZ, 0x2, R{word}"
    yield f"  LOP3.LUT R{odd}, R{odd}, 0x33333333, RZ, 0xc0, !PT"
    yield f"  SHF.R.U32.HI R{even_high}, RZ, 0x10, R{even}"
    yield f"  SHF.R.U32.HI R{odd_high}, RZ, 0x10, R{odd}"


def _load(
    width: str, target: int, pointer: int, offset: int = 0, *, guard: str = ""
) -> Iterator[str]:
    size, where = f".{width}" if width else "", f"+{offset:#x}" if offset else ""
    yield f"  {guard}LDG.E{size}.CONSTANT R{target}, desc[UR8][R{pointer}.64{where}]"


def _zeros(registers: Iterable[int]) -> Iterator[str]:
    yield from (f"  CS2R R{register}, SRZ" for register in registers)


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _header(arch: str, name: str, registers: int, parameters: int) -> str:
    stack = {"sm_90a": 0x28, "sm_120a": 0x37C}[arch]
    return f"""\
// Written by w2_gemm.py, which explains it; change that instead.
.arch {arch}
.kernel {name}
.twin {name}.cu
.registers {registers}
.shared 2048
.parameters {parameters}
  LDC R1, c[0x0][{stack:#x}]
  S2R R0, SR_TID.X
  S2R R2, SR_CTAID.X
  S2R R3, SR_CTAID.Y
"""


SOURCES = {"w2_gemm_bf16": bf16_source, "w2_gemm_e4m3": e4m3_source}
