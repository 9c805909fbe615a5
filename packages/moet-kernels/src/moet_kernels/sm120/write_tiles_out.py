"""What prefill kernels do with their sums: store them, or activate and quantise them.

Registers are those of `write_tiles`: R66:67 the tile, R27 its vectors, sums from R68 on.
"""

from collections.abc import Iterator

from moet_kernels.sm120.write import Kernel

__all__ = ["SUMS", "WARP_BYTES", "activate", "plus", "quantise", "store"]

SUMS = 68
"""First register of the sums: 4 row blocks, 2 halves of the tile, 4 registers of C."""

WARP_BYTES = 16 * 36 * 4
"""Activated values of a warp: 36 floats a vector, so that lanes use other banks."""

_AT_ONCE = 4  # activations that are computed in turn


def plus(offset: int) -> str:
    """Return an offset as it stands in an address."""
    return f"+{offset:#x}" if offset else ""


def _sum(row_block: int, half: int, place: int) -> int:
    """Register of a sum; `place` is that of C: row g + 8 (place / 2), vector 2 t + place % 2."""
    return SUMS + 8 * row_block + 4 * half + place


def store(kernel: Kernel) -> Iterator[str]:
    """Sums of two rows of each row block, for each of the lane's four vectors."""
    yield "  S2R R0, SR_TID.X"
    yield "  S2R R2, SR_CTAID.X"
    yield "  LDC.64 R10, c[0x0][0x398]"
    yield "  LOP3.LUT R3, R0, 0x3, RZ, 0xc0, !PT  // t"
    yield "  SHF.L.U32 R4, R3, 0x1, RZ  // its first vector"
    yield "  IMAD.WIDE.U32 R6, R4, 0x4, R66"
    yield "  SHF.R.U32.HI R5, RZ, 0x5, R0  // warp"
    yield "  LEA R5, R2, R5, 0x2"
    yield "  SHF.R.U32.HI R0, RZ, 0x2, R0"
    yield "  LOP3.LUT R0, R0, 0x7, RZ, 0xc0, !PT  // g"
    yield "  LEA R12, R5, R0, 0x6  // first row"
    yield "  IMAD.WIDE.U32 R10, R12, 0x4, R10"
    if kernel.codec == "nv":
        yield "  LDG.E.64.CONSTANT R12, desc[UR8][R66.64]"
        yield "  LDC R14, c[0x0][0x3b0]"
        yield "  IMAD.WIDE.U32 R12, R14, 0x1, R12"
        yield "  LDG.E.CONSTANT R12, desc[UR8][R12.64+0x8]"
        yield from (f"  FMUL R{r}, R{r}, R12" for r in range(SUMS, SUMS + 32))
    yield "  MOV R15, UR7"
    for half in range(2):
        for c in range(2):
            vector = 8 * half + c
            yield f"  IADD R8, R4, {vector:#x}"
            yield "  ISETP.GE.U32.AND P0, PT, R8, R27, PT"
            yield f"  @!P0 LDG.E.CONSTANT R9, desc[UR8][R6.64{plus(0x10 + 4 * vector)}]"
            yield "  @!P0 IMAD.WIDE.U32 R16, R9, R15, RZ"
            yield "  @!P0 LEA R18, P5, R16, R10, 0x2"
            yield "  @!P0 LEA.HI.X R19, R16, R11, R17, 0x2, P5"
            for i in range(4):
                for row in range(2):
                    place = f"desc[UR8][R18.64{plus(64 * i + 32 * row)}]"
                    yield f"  @!P0 STG.E {place}, R{_sum(i, half, 2 * row + c)}"
    yield "  EXIT"


def activate(kernel: Kernel) -> Iterator[str]:
    """silu(gate) * up of the lane's 16 elements, into shared memory: vectors of 36 floats."""
    yield "  S2R R0, SR_TID.X"
    yield "  S2R R2, SR_CgaCtaId"
    yield "  MOV R3, 0x400"
    yield "  LEA R3, R2, R3, 0x18"
    yield "  SHF.R.U32.HI R4, RZ, 0x5, R0  // warp"
    yield f"  IMAD R3, R4, {WARP_BYTES:#x}, R3"
    yield "  LOP3.LUT R5, R0, 0x3, RZ, 0xc0, !PT  // t"
    yield "  SHF.R.U32.HI R6, RZ, 0x2, R0"
    yield "  LOP3.LUT R6, R6, 0x7, RZ, 0xc0, !PT  // g"
    yield "  IMAD R3, R5, 0x120, R3  // of vector 2 t"
    yield "  IMAD R3, R6, 0x4, R3"
    yield "  LDC R10, c[0x0][0x3b8]  // limit"
    yield "  FADD R11, -R10, -RZ"
    yield "  MOV R12, 0xc2ae0000  // -87"
    yield "  MOV R13, 0x42ae0000"
    yield "  MOV R14, 0xbfb8aa3b  // -log2(e), then what that lacks"
    yield "  MOV R15, 0xb2a57060"
    yield "  MOV R16, 0x4b400000  // 1.5 2^23: added, it leaves an integer"
    if kernel.codec == "nv":
        yield "  LDG.E.64.CONSTANT R18, desc[UR8][R66.64]"
        yield "  LDC R17, c[0x0][0x3c0]"
        yield "  IMAD.WIDE.U32 R18, R17, 0x1, R18"
        yield "  LDG.E.64.CONSTANT R18, desc[UR8][R18.64]"
        yield from (f"  FMUL R{r}, R{r}, R18" for r in range(SUMS, SUMS + 16))
        yield from (f"  FMUL R{r}, R{r}, R19" for r in range(SUMS + 16, SUMS + 32))
    elements = [(i, half, place) for i in range(2) for half in range(2) for place in range(4)]
    for first in range(0, len(elements), _AT_ONCE):
        at_once = elements[first : first + _AT_ONCE]
        streams = [
            list(_activation(_sum(*e), _sum(e[0] + 2, *e[1:]), 32 + 4 * n, n))
            for n, e in enumerate(at_once)
        ]
        yield from (line for lines in zip(*streams, strict=True) for line in lines)
        for row_block, half, place in at_once:
            offset = 144 * (8 * half + place % 2) + 4 * (16 * row_block + 8 * (place >> 1))
            yield f"  STS [R3{plus(offset)}], R{_sum(row_block, half, place)}"


def _activation(gate: int, up: int, free: int, number: int) -> Iterator[str]:
    """One element, into the register of gate: exp(-gate) = 2^n 2^f, as in the twin."""
    predicate = ("P0", "P2", "P5", "P6")[number]
    bounded, whole, rest = free, free + 1, free + 2
    yield f"  FSETP.GT.AND {predicate}, PT, R{gate}, R10, PT"
    yield f"  FSEL R{gate}, R{gate}, R10, !{predicate}"
    yield f"  FSETP.GT.AND {predicate}, PT, R{up}, R10, PT"
    yield f"  FSEL R{up}, R{up}, R10, !{predicate}"
    yield f"  FSETP.GEU.AND {predicate}, PT, R{up}, R11, PT"
    yield f"  FSEL R{up}, R{up}, R11, {predicate}"
    yield f"  FMNMX R{bounded}, R{gate}, R12, !PT"
    yield f"  FMNMX R{bounded}, R{bounded}, R13, PT"
    yield f"  FFMA R{whole}, R{bounded}, R14, 12582912"
    yield f"  FADD R{rest}, R16, -R{whole}"
    yield f"  FFMA R{rest}, R{bounded}, R14, R{rest}"
    yield f"  FFMA R{rest}, R{bounded}, R15, R{rest}"
    yield f"  MUFU.EX2 R{rest}, R{rest}"
    yield f"  IMAD R{rest}, R{whole}, 0x800000, R{rest}"
    yield f"  FADD R{rest}, R{rest}, 1"
    yield f"  MUFU.RCP R{rest}, R{rest}"
    yield f"  FMUL R{gate}, R{gate}, R{rest}"
    yield f"  FMUL R{gate}, R{gate}, R{up}"


def quantise() -> Iterator[str]:
    """Half the 32 columns of a vector become E4M3: of vector lane / 2, half lane % 2."""
    yield "together:"
    yield "  BAR.SYNC.DEFER_BLOCKING 0x0"
    yield "  @P4 EXIT"
    yield "  S2R R0, SR_TID.X"
    yield "  S2R R2, SR_CgaCtaId"
    yield "  S2R R14, SR_CTAID.X"
    yield "  SHF.R.U32.HI R4, RZ, 0x5, R0  // warp"
    yield "  SHF.R.U32.HI R5, RZ, 0x1, R0"
    yield "  LOP3.LUT R5, R5, 0xf, RZ, 0xc0, !PT  // vector"
    yield "  ISETP.GE.U32.AND P0, PT, R5, R27, PT"
    yield "  @P0 EXIT"
    yield "  IMAD.WIDE.U32 R12, R5, 0x4, R66"
    yield "  LDG.E.CONSTANT R9, desc[UR8][R12.64+0x10]  // pair"
    yield "  LOP3.LUT R6, R0, 0x1, RZ, 0xc0, !PT  // half"
    yield "  MOV R3, 0x400"
    yield "  LEA R3, R2, R3, 0x18"
    yield f"  IMAD R3, R4, {WARP_BYTES:#x}, R3"
    yield "  IMAD R3, R5, 0x90, R3"
    yield "  IMAD R7, R6, 0x40, R3"
    yield "  LOP3.LUT R8, R6, 0x1, RZ, 0x3c, !PT  // the other half"
    yield "  IMAD R8, R8, 0x40, R3"
    for i in range(4):
        yield f"  LDS.128 R{32 + 4 * i}, [R7{plus(16 * i)}]"
    for i in range(4):
        yield f"  LDS.128 R{68 + 4 * i}, [R8{plus(16 * i)}]"
    yield "  LDC R15, c[0x0][0x3bc]  // log2 of the steps of a block of the output's columns"
    yield "  LDC.64 R26, c[0x0][0x398]"
    yield "  LDC.64 R28, c[0x0][0x3b0]"
    yield "  LEA R14, R14, R4, 0x2  // the step of the output"
    yield from _largest()
    yield "  IADD R30, R84, 0x1fffff"
    yield "  SHF.R.U32.HI R30, RZ, 0x17, R30"
    yield "  MOV R7, 0x9"
    yield "  VIMNMX.U32 R30, R30, R7, !PT"
    yield "  IADD R30, R30, -0x8"
    yield "  MOV R7, 0xff800000"
    yield "  IMAD R7, R30, R7, 0x7f000000"
    yield from (f"  FMUL R{r}, R{r}, R7" for r in range(32, 48))
    for i in range(4):
        first = 32 + 4 * i
        pack = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C"
        yield f"  {pack} R{first + 2}, R{first + 3}, R{first + 2}, RZ"
        yield f"  {pack} R{first}, R{first + 1}, R{first}, RZ"
        yield f"  IMAD R{first}, R{first + 2}, 0x10000, R{first}"
    yield "  // Column 16 h + 4 t + j of step s: byte 4 (2 (steps t + s) + h) + j of a block."
    yield "  MOV R17, 0xffffffff"
    yield "  SHF.L.U32 R17, R17, R15, RZ"
    yield "  LOP3.LUT R18, R17, R14, RZ, 0xc, !PT  // s"
    yield "  LOP3.LUT R19, R17, R14, RZ, 0xc0, !PT  // first step of the block"
    yield "  SHF.L.U32 R19, R19, 0x5, RZ"
    yield "  LEA R20, R18, R19, 0x3"
    yield "  LEA R20, R6, R20, 0x2"
    yield "  MOV R21, RZ"
    yield "  IMAD.WIDE.U32 R20, R9, UR7, R20"
    yield "  IADD.64 R20, R20, R26"
    yield "  MOV R22, 0x8"
    yield "  SHF.L.U32 R22, R22, R15, RZ"
    yield "  MOV R23, RZ"
    for t in range(4):
        yield f"  STG.E desc[UR8][R20.64], R{32 + 4 * t}"
        if t < 3:
            yield "  IADD.64 R20, R20, R22"
    yield "  ISETP.NE.U32.AND P0, PT, R6, RZ, PT"
    yield "  @P0 EXIT"
    yield "  USHF.R.U32.HI UR4, URZ, 0x5, UR7"
    yield "  MOV R15, RZ"
    yield "  IMAD.WIDE.U32 R20, R9, UR4, R14"
    yield "  IADD.64 R20, R20, R28"
    yield "  STG.E.U8 desc[UR8][R20.64], R30"
    yield "  EXIT"


def _largest() -> Iterator[str]:
    """R84: the largest magnitude of R32..R47 and R68..R83, of which the latter are lost."""
    for mine, other in zip(range(32, 48), range(68, 84), strict=True):
        yield f"  LOP3.LUT R{other}, R{other}, 0x7fffffff, RZ, 0xc0, !PT"
        yield f"  LOP3.LUT R{mine + 68}, R{mine}, 0x7fffffff, RZ, 0xc0, !PT"
        yield f"  VIMNMX.U32 R{other}, R{other}, R{mine + 68}, !PT"
    distance = 8
    while distance:
        for register in range(68, 68 + distance):
            yield f"  VIMNMX.U32 R{register}, R{register}, R{register + distance}, !PT"
        distance //= 2
    yield "  MOV R84, R68"
