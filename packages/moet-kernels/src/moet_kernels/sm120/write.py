"""Writes the decode kernels' `.sass`: what their twins in `kernels/decode.cuh` do, step for step.

Each kernel is a prologue (find the group, address what this warp reads), the loop over blocks of
columns, and an epilogue (add the four partial sums of an element, then store it or activate and
quantise it). A lane of a warp holds

    R0       column block                   R23      vectors of the group
    R2:3     scales of its vector           R24..31  sums of the two row blocks
    R4..     code words of both row blocks  R32..    fragments of A, then temporaries
    R12..    words of its vector (w2)       R50:51   the group
    R20, R21 scales of the row blocks       R52..59  addresses of codes and scales
    R22      scales of its vector           R60:61   address of its vector

P1: no such vector. fp4 has twice as many code words; its vector is at R32, its fragments at R40.
What nv and bf16 do otherwise is in `write_nv` and `write_bf16`.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from moet_kernels.sm120.write_bf16 import BF16_STORE, bf16_addresses, bf16_loop
from moet_kernels.sm120.write_nv import nv_constants, nv_factors, nv_loop
from moet_kernels.sm120.write_weights import decode_fp4, decode_w2

__all__ = ["KERNELS", "Kernel", "sass_source"]

GROUP_BYTES = 80
REGISTERS = 62
"""64 with the two that are reserved: four blocks of 256 threads a processor."""


class Kernel(NamedTuple):
    """One kernel.

    Attributes:
        name: of the kernel and its files.
        codec: "w2", "fp4" (fp4-mx) or "nv" (fp4-nv), or "bf16": w2 with bfloat16 vectors.
        down: whether it is the down projection, else gate and up with the activation.
        steps: blocks of 32 columns that lie together: 4, or 2 where K is divisible by 64 only.
    """

    name: str
    codec: str
    down: bool
    steps: int

    @property
    def words(self) -> int:
        """Words of codes of a lane in a block of columns of a row block."""
        return self.steps if self.codec in ("w2", "bf16") else 2 * self.steps

    @property
    def vector(self) -> int:
        """First register of the vector."""
        return 32 if self.codec == "fp4" else 12

    @property
    def scales(self) -> int:
        """Bytes of scales of a row in a block of columns."""
        return 2 * self.steps if self.codec == "nv" else self.steps

    @property
    def parameters(self) -> int:
        """Bytes of kernel parameters."""
        return (48 if self.down else 64) + (4 if self.codec == "nv" else 0)


KERNELS = (
    Kernel("w2_gate_up", "w2", False, 4),
    Kernel("w2_down", "w2", True, 4),
    Kernel("w2_gate_up_k64", "w2", False, 2),
    Kernel("w2_down_k64", "w2", True, 2),
    Kernel("fp4_gate_up", "fp4", False, 4),
    Kernel("fp4_down", "fp4", True, 4),
    Kernel("fp4_gate_up_k64", "fp4", False, 2),
    Kernel("fp4_down_k64", "fp4", True, 2),
    Kernel("nv_gate_up", "nv", False, 4),
    Kernel("nv_down", "nv", True, 4),
    Kernel("nv_gate_up_k64", "nv", False, 2),
    Kernel("nv_down_k64", "nv", True, 2),
    Kernel("bf16_gate_up", "bf16", False, 4),
    Kernel("bf16_down", "bf16", True, 4),
    Kernel("bf16_gate_up_k64", "bf16", False, 2),
    Kernel("bf16_down_k64", "bf16", True, 2),
)

_PARTIAL_BYTES = 8 * 8 * 33 * 4
_MAGNITUDE_BYTES = 8 * 32 * 4

_START = """\
  LDC R1, c[0x0][0x37c]
  S2R R4, SR_CTAID.Y
  LDC.64 R50, c[0x0][0x380]
  LDCU.64 UR8, c[0x0][0x358]
  S2R R0, SR_TID.X
  S2UR UR10, SR_CTAID.X
  LDCU UR6, c[0x0][0x3a0]  // K
  LDCU UR7, c[0x0][0x3a4]  // N
  IMAD.WIDE.U32 R50, R4, 0x50, R50
  LDG.E.128.CONSTANT R4, desc[UR8][R50.64]  // row, count
  SHF.R.U32.HI R8, RZ, 0x5, R0  // warp
  LOP3.LUT R9, R0, 0x1f, RZ, 0xc0, !PT  // lane
  SHF.R.U32.HI R10, RZ, 0x2, R9  // g
  LOP3.LUT R11, R9, 0x3, RZ, 0xc0, !PT  // t
  IMAD.WIDE.U32 R12, R10, 0x4, R50
  CS2R R24, SRZ
  CS2R R26, SRZ
  CS2R R28, SRZ
  CS2R R30, SRZ
  ISETP.NE.U32.AND P0, PT, R6, RZ, PT
  @!P0 EXIT
  ISETP.GE.U32.AND P1, PT, R10, R6, PT
  MOV R23, R6
"""

_REDUCE = """\
reduce:
  S2R R0, SR_TID.X
  S2R R2, SR_CgaCtaId
  MOV R3, 0x400
  SHF.R.U32.HI R4, RZ, 0x5, R0  // warp, from now on also the number of a vector
  LOP3.LUT R5, R0, 0x1f, RZ, 0xc0, !PT  // lane, then also a row of the tile
  LEA R3, R2, R3, 0x18
  IMAD R6, R4, 0x420, R3
  IMAD R6, R5, 0x4, R6
  ISETP.GE.U32.AND P1, PT, R4, R23, PT
  IMAD.WIDE.U32 R12, R4, 0x4, R50
  @!P1 LDG.E.CONSTANT R9, desc[UR8][R12.64+0x10]  // pair
  STS [R6], R24
  STS [R6+0x210], R25
  STS [R6+0x84], R26
  STS [R6+0x294], R27
  STS [R6+0x108], R28
  STS [R6+0x318], R29
  STS [R6+0x18c], R30
  STS [R6+0x39c], R31
"""

_SUM = """\
  BAR.SYNC.DEFER_BLOCKING 0x0
  @P1 EXIT
  LOP3.LUT R7, R4, 0x1, RZ, 0xc0, !PT
  SHF.R.U32.HI R8, RZ, 0x3, R5
  LEA R7, R7, R8, 0x2
  IMAD R7, R7, 0x84, R3
  LOP3.LUT R8, R5, 0x7, RZ, 0xc0, !PT
  SHF.R.U32.HI R6, RZ, 0x1, R4
  LEA R8, R8, R6, 0x2
  IMAD R7, R8, 0x4, R7
  LDS R16, [R7]
  LDS R17, [R7+0x420]
  LDS R18, [R7+0x840]
  LDS R19, [R7+0xc60]
  LDS R20, [R7+0x1080]
  LDS R21, [R7+0x14a0]
  LDS R22, [R7+0x18c0]
  LDS R23, [R7+0x1ce0]
  FADD R16, R16, R17
  FADD R16, R18, R16
  FADD R16, R19, R16
  FADD R20, R20, R21
  FADD R20, R22, R20
  FADD R20, R23, R20
"""

_STORE = """\
  LDC.64 R12, c[0x0][0x398]
  IMAD R7, R9, UR7, RZ
  IMAD.WIDE.U32 R10, R9, UR7, RZ
  SHF.L.U32 R8, R14, 0x6, RZ
  IADD R14, R8, R5
  MOV R15, RZ
  IADD.64 R10, R10, R14
  LEA R12, P2, R10, R12, 0x2
  LEA.HI.X R13, R10, R13, R11, 0x2, P2
  STG.E desc[UR8][R12.64], R16
  IADD R14, R14, 0x20
  ISETP.GE.U32.AND P0, PT, R14, UR7, PT
  @P0 EXIT
  STG.E desc[UR8][R12.64+0x80], R20
  EXIT
"""

_ACTIVATE = """\
  LDC R10, c[0x0][0x3b8]  // limit
  LDC.64 R26, c[0x0][0x398]
  FSETP.GT.AND P0, PT, R16, R10, PT
  FSEL R16, R16, R10, !P0
  FSETP.GT.AND P0, PT, R20, R10, PT
  FSEL R20, R20, R10, !P0
  FADD R11, -R10, -RZ
  FSETP.GEU.AND P0, PT, R20, R11, PT
  FSEL R20, R20, R11, P0
  // exp(-gate) = 2^n 2^f
  MOV R10, 0xc2ae0000  // -87
  MOV R19, 0x42ae0000
  MOV R12, 0xbfb8aa3b  // -log2(e), then what that lacks
  MOV R13, 0xb2a57060
  FMNMX R11, R16, R10, !PT
  FMNMX R11, R11, R19, PT
  MOV R19, 0x4b400000  // 1.5 2^23: added, it leaves an integer
  FFMA R17, R11, R12, 12582912
  FADD R18, R19, -R17
  FFMA R18, R11, R12, R18
  FFMA R18, R11, R13, R18
  MUFU.EX2 R18, R18
  IMAD R18, R17, 0x800000, R18
  FADD R18, R18, 1
  MUFU.RCP R18, R18
  FMUL R16, R16, R18
  FMUL R16, R16, R20
"""

_MAGNITUDE = """\
  LDC R15, c[0x0][0x3bc]  // log2 of the steps of a block of the output's columns
  LDC.64 R28, c[0x0][0x3b0]
  // The largest magnitude of the warp's 32 columns, through memory that no other warp uses.
  IMAD R6, R4, 0x80, R3
  IMAD R7, R5, 0x4, R6
  LOP3.LUT R17, R16, 0x7fffffff, RZ, 0xc0, !PT
  STS [R7+0x2100], R17
"""

_QUANTISE = """\
  IADD R30, R30, 0x1fffff
  SHF.R.U32.HI R30, RZ, 0x17, R30
  MOV R7, 0x9
  VIMNMX.U32 R30, R30, R7, !PT
  IADD R30, R30, -0x8
  MOV R7, 0xff800000
  IMAD R7, R30, R7, 0x7f000000
  FMUL R7, R16, R7
  MOV R17, RZ
  F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R7, R17, R7, RZ
  // Column 16 h + 4 t + j of step s lies at byte 4 (2 (steps t + s) + h) + j of its block.
  MOV R17, 0xffffffff
  SHF.L.U32 R17, R17, R15, RZ
  LOP3.LUT R18, R17, R14, RZ, 0xc, !PT  // s
  LOP3.LUT R19, R17, R14, RZ, 0xc0, !PT  // first tile of the block
  SHF.L.U32 R19, R19, 0x5, RZ
  SHF.R.U32.HI R20, RZ, 0x2, R5
  LOP3.LUT R20, R20, 0x3, RZ, 0xc0, !PT  // t
  SHF.L.U32 R20, R20, R15, RZ
  IADD R20, R20, R18
  LEA R20, R20, R19, 0x3
  LOP3.LUT R21, R5, 0x3, RZ, 0xc0, !PT  // j
  SHF.R.U32.HI R22, RZ, 0x4, R5  // h
  LEA R21, R22, R21, 0x2
  IADD R20, R20, R21
  MOV R21, RZ
  IMAD.WIDE.U32 R20, R9, UR7, R20
  IADD.64 R20, R20, R26
  STG.E.U8 desc[UR8][R20.64], R7
  ISETP.NE.U32.AND P0, PT, R5, RZ, PT
  @P0 EXIT
  USHF.R.U32.HI UR4, URZ, 0x5, UR7
  MOV R15, RZ
  IMAD.WIDE.U32 R20, R9, UR4, R14
  IADD.64 R20, R20, R28
  STG.E.U8 desc[UR8][R20.64], R30
  EXIT
"""


def sass_source(kernel: Kernel) -> str:
    """Return the source text of a kernel."""
    quantises = not kernel.down and kernel.codec != "bf16"
    shared = _PARTIAL_BYTES + (_MAGNITUDE_BYTES if quantises else 0)
    header = f"""\
// Written by write.py, which explains it; change that instead.
.arch sm_120a
.kernel {kernel.name}
.twin {kernel.name}.cu
.registers {REGISTERS}
.shared {shared}
.parameters {kernel.parameters}
"""
    load, multiply = nv_factors(down=kernel.down) if kernel.codec == "nv" else ([], [])
    loops = {"nv": nv_loop, "bf16": bf16_loop}
    loop = loops[kernel.codec](kernel.steps) if kernel.codec in loops else _loop(kernel)
    parts = [header, _START, _lines(_addresses(kernel)), "loop:\n", _lines(loop), _REDUCE]
    parts += [_lines(load), _SUM, _lines(multiply), "  S2R R14, SR_CTAID.X\n"]
    if kernel.down:
        return "".join([*parts, _STORE])
    if kernel.codec == "bf16":
        return "".join([*parts, _ACTIVATE, BF16_STORE])
    return "".join([*parts, _ACTIVATE, _MAGNITUDE, _lines(_largest()), _QUANTISE])


def _addresses(kernel: Kernel) -> Iterator[str]:
    """R52..R61 and R2:3; on the way R13 first column block, R14 half, R15 row block, R16 both."""
    steps, words = kernel.steps, kernel.words
    vector = 0x10 if kernel.down else 0x30
    yield f"  @!P1 LDG.E.CONSTANT R12, desc[UR8][R12.64+{vector:#x}]  // pair or token"
    yield "  LOP3.LUT R13, R8, 0x3, RZ, 0xc0, !PT"
    yield "  SHF.R.U32.HI R14, RZ, 0x2, R8"
    yield f"  USHF.R.U32.HI UR11, URZ, {5 + _log2(steps):#x}, UR6  // column blocks"
    yield "  ISETP.GE.U32.AND P0, PT, R13, UR11, PT"
    yield "  @P0 BRA reduce"
    yield "  USHF.R.U32.HI UR4, URZ, 0x4, UR7  // row blocks, of each of gate and up"
    if kernel.down:
        yield "  USHF.L.U32 UR5, UR10, 0x2, URZ"
        yield "  MOV R17, UR5"
        yield "  LEA R15, R14, R17, 0x1"
        yield "  ISETP.GE.U32.AND P0, PT, R15, UR4, PT"
        yield "  @P0 BRA reduce"
    else:
        yield "  USHF.L.U32 UR5, UR10, 0x1, URZ"
        yield "  MOV R17, UR5"
        yield "  IMAD R15, R14, UR4, R17"
    yield "  IMAD R16, R15, UR11, R13"
    yield "  LDC R36, c[0x0][0x3a8]"
    yield "  LDC R37, c[0x0][0x3ac]"
    yield "  IMAD.WIDE.U32 R38, R36, 0x1, R4  // codes of the matrix"
    yield "  IMAD.WIDE.U32 R40, R37, 0x1, R4  // its scales"
    yield f"  IMAD.WIDE.U32 R38, R16, {128 * words:#x}, R38"
    yield f"  IMAD.WIDE.U32 R52, R9, {4 * min(words, 4):#x}, R38"
    yield "  MOV R42, UR6"
    yield f"  IMAD.WIDE.U32 R54, R42, {4 if kernel.words == steps else 8:#x}, R52"
    if kernel.codec == "bf16":
        yield from bf16_addresses(steps)
        return
    if kernel.codec == "nv":
        yield "  LEA R18, R16, R10, 0x4"
    else:
        yield "  // Scales of rows g and g + 8 lie in lanes t = 0 and 1 (and, unused, 2 and 3)."
        yield "  LOP3.LUT R18, R11, 0x1, RZ, 0xc0, !PT"
        yield "  LEA R18, R18, R10, 0x3"
        yield "  LEA R18, R16, R18, 0x4"
        yield "  SHF.R.U32.HI R42, RZ, 0x1, R42"
    yield f"  IMAD.WIDE.U32 R56, R18, {kernel.scales:#x}, R40"
    yield "  IMAD.WIDE.U32 R58, R42, 0x1, R56  // a row block has K / 2 of them, or K"
    yield "  LDC.64 R60, c[0x0][0x388]"
    yield "  LDC.64 R2, c[0x0][0x390]"
    yield "  MOV R0, R13"
    yield "  @P1 MOV R12, RZ"
    yield "  IMAD.WIDE.U32 R60, R12, UR6, R60"
    yield "  LEA R18, R13, R11, 0x2"
    yield f"  IMAD.WIDE.U32 R60, R18, {8 * steps:#x}, R60"
    yield "  USHF.R.U32.HI UR5, URZ, 0x5, UR6"
    yield "  IMAD.WIDE.U32 R2, R12, UR5, R2"
    yield f"  IMAD.WIDE.U32 R2, R13, {steps:#x}, R2"
    if kernel.codec == "w2":
        yield "  MOV R48, 0x4838b8c8  // e4m3 -4, -1, 1, 4"
    yield "  UMOV UR12, 0x9  // byte 1 of both scale words, and so on"
    yield "  UMOV UR13, 0x12"
    yield "  UMOV UR14, 0x1b"
    if kernel.codec != "w2":
        yield "  UMOV UR15, 0x0"
    yield "  MOV R22, RZ"
    if kernel.codec == "nv":
        yield from nv_constants()
        return
    yield from (f"  CS2R R{kernel.vector + i}, SRZ" for i in range(0, 2 * steps, 2))


def _loop(kernel: Kernel) -> Iterator[str]:
    steps, vector = kernel.steps, kernel.vector
    narrow = "" if steps == 4 else ".U16"
    yield from _codes(kernel, 4, 52)
    yield from _codes(kernel, _second(kernel), 54)
    yield f"  LDG.E{narrow}.CONSTANT R20, desc[UR8][R56.64]"
    yield f"  LDG.E{narrow}.CONSTANT R21, desc[UR8][R58.64]"
    yield f"  @!P1 LDG.E{narrow}.CONSTANT R22, desc[UR8][R2.64]"
    for part in range(steps // 2):
        offset = f"+{16 * part:#x}" if part else ""
        yield f"  @!P1 LDG.E.128.CONSTANT R{vector + 4 * part}, desc[UR8][R60.64{offset}]"
    yield "  IADD R0, R0, 0x4"
    yield "  ISETP.GE.U32.AND P2, PT, R0, UR11, PT"
    for step in range(steps):
        first, second = _fragments(kernel, step)
        if kernel.codec == "w2":
            yield from decode_w2((4 + step, 8 + step), (first, second), range(44, 48), 48)
        else:
            yield from decode_fp4(4 + 2 * step, first)
            yield from decode_fp4(12 + 2 * step, second)
        # Compiled code has URZ with e4m3 weights, never with e2m1.
        kind, first_byte = ("E4M3", "URZ") if kernel.codec == "w2" else ("E2M1", "UR15")
        byte = (first_byte, "UR12", "UR13", "UR14")[step]
        for sums, a, scale in ((24, first, 20), (28, second, 21)):
            operands = f"R{sums}, R{a}, R{vector + 2 * step}, R{sums}, R{scale}, R22, {byte}"
            yield f"  QMMA.SF.16832.F32.{kind}.E4M3.E8 {operands}"
    codes = 512 * kernel.words
    others = ((56, 64 * steps), (58, 64 * steps), (60, 128 * steps), (2, 4 * steps))
    for register, stride in ((52, codes), (54, codes), *others):
        yield f"  IADD.64 R{register}, R{register}, {stride:#x}"
    yield "  @!P2 BRA loop"
    yield "  NOP  // the last sums need as long as two of the longest stalls"
    yield "  NOP"


def _second(kernel: Kernel) -> int:
    """First register of the second row block's code words."""
    return 8 if kernel.codec == "w2" else 12


def _fragments(kernel: Kernel, step: int) -> tuple[int, int]:
    """First registers of A of both row blocks; w2 changes one of them from step to step."""
    if kernel.codec == "w2":
        return (32 if step % 2 == 0 else 40), 36
    return 40, 44


def _codes(kernel: Kernel, target: int, pointer: int) -> Iterator[str]:
    """Load a lane's code words of a block of columns: at most 16 bytes lie together."""
    if kernel.words < 4:
        yield f"  LDG.E.64.CONSTANT R{target}, desc[UR8][R{pointer}.64]"
        return
    for part in range(kernel.words // 4):
        offset = f"+{512 * part:#x}" if part else ""
        where = f"desc[UR8][R{pointer}.64{offset}]"
        yield f"  LDG.E.NA.LTC128B.128.CONSTANT R{target + 4 * part}, {where}"


def _largest() -> Iterator[str]:
    """R30: the largest of the 32 numbers of a warp."""
    registers = (*range(32, 60, 4), 20)
    for part, a in enumerate(registers):
        yield f"  LDS.128 R{a}, [R6+{_PARTIAL_BYTES + 16 * part:#x}]"
    yield "  MOV R30, RZ"
    for a in registers:
        yield f"  VIMNMX.U32 R{a}, R{a}, R{a + 1}, !PT"
        yield f"  VIMNMX.U32 R{a + 2}, R{a + 2}, R{a + 3}, !PT"
        yield f"  VIMNMX.U32 R{a}, R{a}, R{a + 2}, !PT"
        yield f"  VIMNMX.U32 R30, R30, R{a}, !PT"


def _log2(number: int) -> int:
    return number.bit_length() - 1


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
