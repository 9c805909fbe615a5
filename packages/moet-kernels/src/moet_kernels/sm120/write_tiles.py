"""Writes the prefill kernels' `.sass`: what their twins in `kernels/tiles.cuh` do, step for step.

A warp has four blocks of 16 rows of the matrix and a tile of 16 vectors, 8 to an instruction; it
goes through the columns in their order and shares nothing with other warps. A lane holds

    R0       column block                   R28..31   scales of the row blocks
    R2..9    addresses of codes             R32..47   code words of the row blocks
    R10..17  addresses of scales            R48..63   words of both vectors
    R18..21  addresses of both vectors      R64, R65  scales of both vectors
    R22..25  addresses of their scales      R66:67    the tile
    R26      e4m3 levels, or 2^0 (nv)       R68..99   sums: row block, vectors, then as in C
    R27      vectors of the tile            R100..    fragments of A, then temporaries

P1, P3: no such vector in the first or second 8. P4: no such rows. In nv, R28..31 are scales of rows
as float32, R56..63 the words they come from, and products lie at R108..123.
"""

from collections.abc import Iterator

from moet_kernels.sm120.write import Kernel
from moet_kernels.sm120.write_nv import from_e4m3
from moet_kernels.sm120.write_tiles_out import SUMS, WARP_BYTES, activate, plus, quantise, store
from moet_kernels.sm120.write_weights import decode_fp4, decode_w2

__all__ = ["TILES_KERNELS", "tiles_source"]

REGISTERS = 126
"""128 with the two that are reserved: four blocks of 128 threads a processor."""

_CODES, _SCALES, _VECTORS, _VECTOR_SCALES = 32, 28, 48, 64
_FRAGMENTS, _TEMPORARIES = 100, 116
_NV_SCALES, _NV_PRODUCTS = 56, 108


TILES_KERNELS = tuple(
    Kernel(f"{codec}_{'down' if down else 'gate_up'}_tiles{suffix}", codec, down, steps)
    for codec in ("w2", "fp4", "nv")
    for steps, suffix in ((4, ""), (2, "_k64"))
    for down in (False, True)
)

_START = """\
  LDC R1, c[0x0][0x37c]
  S2R R104, SR_CTAID.Y
  LDC.64 R66, c[0x0][0x380]
  LDCU.64 UR8, c[0x0][0x358]
  S2R R100, SR_TID.X
  S2UR UR10, SR_CTAID.X
  LDCU UR6, c[0x0][0x3a0]  // K
  LDCU UR7, c[0x0][0x3a4]  // N
  IMAD.WIDE.U32 R66, R104, 0x90, R66
  LDG.E.128.CONSTANT R104, desc[UR8][R66.64]  // row, count
  SHF.R.U32.HI R108, RZ, 0x5, R100  // warp
  LOP3.LUT R101, R100, 0x1f, RZ, 0xc0, !PT  // lane
  SHF.R.U32.HI R102, RZ, 0x2, R101  // g
  LOP3.LUT R103, R101, 0x3, RZ, 0xc0, !PT  // t
  IMAD.WIDE.U32 R110, R102, 0x4, R66
  USHF.L.U32 UR5, UR10, 0x2, URZ
  MOV R109, UR5
  IADD R109, R109, R108  // number of the warp's rows
  ISETP.NE.U32.AND P0, PT, R106, RZ, PT
  @!P0 EXIT
  MOV R27, R106
  ISETP.GE.U32.AND P1, PT, R102, R106, PT
  IADD R112, R102, 0x8
  ISETP.GE.U32.AND P3, PT, R112, R106, PT
"""


def tiles_source(kernel: Kernel) -> str:
    """Return the source text of a kernel."""
    shared = 0 if kernel.down else 4 * WARP_BYTES
    header = f"""\
// Written by write_tiles.py, which explains it; change that instead.
.arch sm_120a
.kernel {kernel.name}
.twin {kernel.name}.cu
.registers {REGISTERS}
.shared {shared}
.parameters {kernel.parameters}
"""
    lines = [*_addresses(kernel), "loop:", *_loop(kernel)]
    lines += store(kernel) if kernel.down else [*activate(kernel), *quantise()]
    return header + _START + "".join(f"{line}\n" for line in lines)


def _addresses(kernel: Kernel) -> Iterator[str]:
    """R0, R2..R26 and the sums; R100..R103 are the thread, the lane, g and t, R109 the rows."""
    vector = 0x10 if kernel.down else 0x50
    yield f"  @!P1 LDG.E.CONSTANT R112, desc[UR8][R110.64+{vector:#x}]  // pair or token"
    yield f"  @!P3 LDG.E.CONSTANT R114, desc[UR8][R110.64+{vector + 0x20:#x}]"
    yield f"  USHF.R.U32.HI UR4, URZ, {6 if kernel.down else 5:#x}, UR7"
    yield "  ISETP.GE.U32.AND P4, PT, R109, UR4, PT"
    yield "  @P4 EXIT" if kernel.down else "  @P4 BRA together"
    yield f"  SHF.L.U32 R108, R109, {2 if kernel.down else 1:#x}, RZ  // first row block"
    yield "  LDC R36, c[0x0][0x3a8]"
    yield "  LDC R37, c[0x0][0x3ac]"
    yield "  IMAD.WIDE.U32 R38, R36, 0x1, R104  // codes of the matrix"
    yield "  IMAD.WIDE.U32 R40, R37, 0x1, R104  // its scales"
    yield f"  IMAD.WIDE.U32 R38, R101, {4 * _part(kernel) * _words(kernel):#x}, R38"
    if kernel.codec == "nv":
        yield "  MOV R42, R102"
    else:
        yield "  // Scales of rows g and g + 8 lie in lanes t = 0 and 1 (and, unused, 2 and 3)."
        yield "  LOP3.LUT R42, R103, 0x1, RZ, 0xc0, !PT"
        yield "  LEA R42, R42, R102, 0x3"
    yield f"  IMAD.WIDE.U32 R40, R42, {kernel.scales:#x}, R40"
    yield "  USHF.R.U32.HI UR5, URZ, 0x1, UR6"
    yield "  MOV R43, UR5  // K / 2"
    if kernel.down:
        yield "  MOV R44, 0x2"
    else:
        yield "  USHF.R.U32.HI UR4, URZ, 0x4, UR7  // row blocks of each of gate and up"
        yield "  MOV R44, UR4"
    yield from _row_blocks(2, 38, 8 * _words(kernel))
    yield from _row_blocks(10, 40, 2 if kernel.codec == "nv" else 1)
    yield "  LDC.64 R38, c[0x0][0x388]"
    yield "  LDC.64 R40, c[0x0][0x390]"
    yield "  @P1 MOV R112, RZ"
    yield "  @P3 MOV R114, RZ"
    yield f"  IMAD.WIDE.U32 R38, R103, {8 * kernel.steps:#x}, R38"
    yield "  USHF.R.U32.HI UR5, URZ, 0x5, UR6"
    for half, number in enumerate((112, 114)):
        yield f"  IMAD.WIDE.U32 R{18 + 2 * half}, R{number}, UR6, R38"
        yield f"  IMAD.WIDE.U32 R{22 + 2 * half}, R{number}, UR5, R40"
    yield f"  USHF.R.U32.HI UR11, URZ, {5 + _log2(kernel.steps):#x}, UR6  // column blocks"
    yield "  MOV R0, RZ"
    yield "  UMOV UR12, 0x9  // byte 1 of both scale words, and so on"
    yield "  UMOV UR13, 0x12"
    yield "  UMOV UR14, 0x1b"
    if kernel.codec == "w2":
        yield "  MOV R26, 0x4838b8c8  // e4m3 -4, -1, 1, 4"
    else:
        yield "  UMOV UR15, 0x0"
    if kernel.codec == "nv":
        yield "  MOV R26, 0x7f7f7f7f"
        yield from (f"  CS2R R{register}, SRZ" for register in (102, 104))
    zeros = (
        *range(SUMS, 100, 2),
        *range(_VECTORS, _VECTORS + 4 * _part(kernel), 2),
        _VECTOR_SCALES,
    )
    yield from (f"  CS2R R{register}, SRZ" for register in zeros)


def _part(kernel: Kernel) -> int:
    """Steps that are loaded together."""
    return kernel.steps if kernel.codec == "w2" else 2


def _words(kernel: Kernel) -> int:
    """Words of codes of a lane in a step of a row block."""
    return kernel.words // kernel.steps


def _row_blocks(target: int, base: int, size: int) -> Iterator[str]:
    """Addresses of the four row blocks (first R108, R44 apart) that have size K / 2 bytes each."""
    first, apart = 108, 44
    if size > 1:
        yield f"  SHF.L.U32 R45, R108, {_log2(size):#x}, RZ"
        yield f"  SHF.L.U32 R46, R44, {_log2(size):#x}, RZ"
        first, apart = 45, 46
    yield f"  IMAD.WIDE.U32 R{target}, R{first}, UR5, R{base}"
    yield f"  IMAD.WIDE.U32 R{target + 2}, R43, {size:#x}, R{target}"
    yield f"  IMAD.WIDE.U32 R{target + 4}, R{apart}, UR5, R{target}"
    yield f"  IMAD.WIDE.U32 R{target + 6}, R43, {size:#x}, R{target + 4}"


def _loop(kernel: Kernel) -> Iterator[str]:
    narrow = "" if kernel.steps == 4 else ".U16"
    if kernel.codec != "nv":
        for i in range(4):
            yield f"  LDG.E{narrow}.CONSTANT R{_SCALES + i}, desc[UR8][R{10 + 2 * i}.64]"
    for half, missing in enumerate(("P1", "P3")):
        where = f"R{_VECTOR_SCALES + half}, desc[UR8][R{22 + 2 * half}.64]"
        yield f"  @!{missing} LDG.E{narrow}.CONSTANT {where}"
    for first in range(0, kernel.steps, _part(kernel)):
        yield from _loads(kernel, first)
        if first == 0:
            yield "  IADD R0, R0, 0x1"
            yield "  ISETP.GE.U32.AND P2, PT, R0, UR11, PT"
        if kernel.codec == "nv":
            yield from _part_nv(first)
            continue
        for step in range(_part(kernel)):
            # Compiled code has URZ with e4m3 weights, never with e2m1.
            byte = ("URZ" if kernel.codec == "w2" else "UR15", "UR12", "UR13", "UR14")[first + step]
            yield from _step(kernel, step, byte)
    strides = {2: 128 * _words(kernel) * kernel.steps, 10: 16 * kernel.scales}
    for first, stride in strides.items():
        yield from (f"  IADD.64 R{r}, R{r}, {stride:#x}" for r in range(first, first + 8, 2))
    for first, stride in {18: 32 * kernel.steps, 22: kernel.steps}.items():
        yield from (f"  IADD.64 R{r}, R{r}, {stride:#x}" for r in range(first, first + 4, 2))
    yield "  @!P2 BRA loop"
    yield "  NOP  // the last sums need as long as two of the longest stalls"
    yield "  NOP"


def _loads(kernel: Kernel, first: int) -> Iterator[str]:
    """Codes, vectors, and nv's scales of the steps from `first` on that are loaded together."""
    part = first // 2
    wide = _part(kernel) * _words(kernel) == 4
    for i in range(4):
        place = f"desc[UR8][R{2 + 2 * i}.64{plus(512 * part)}]"
        load = "LDG.E.NA.LTC128B.128" if wide else "LDG.E.64"
        yield f"  {load}.CONSTANT R{_CODES + 4 * i}, {place}"
    for half, missing in enumerate(("P1", "P3")):
        for j in range(_part(kernel) // 2):
            target = _VECTORS + 2 * _part(kernel) * half + 4 * j
            place = f"desc[UR8][R{18 + 2 * half}.64{plus(16 * (part + j))}]"
            yield f"  @!{missing} LDG.E.128.CONSTANT R{target}, {place}"
    if kernel.codec == "nv":
        for i in range(4):
            for row in range(2):
                place = f"desc[UR8][R{10 + 2 * i}.64{plus(4 * part + 16 * kernel.steps * row)}]"
                yield f"  LDG.E.CONSTANT R{_NV_SCALES + 2 * i + row}, {place}"


def _step(kernel: Kernel, step: int, byte: str) -> Iterator[str]:
    """Decode the step of all row blocks, then multiply each with both halves of the tile."""
    fragments = [_FRAGMENTS + 4 * i for i in range(4)]
    words = [_CODES + 4 * i + _words(kernel) * step for i in range(4)]
    if kernel.codec == "w2":
        for i in (0, 2):
            temporaries = range(_TEMPORARIES, _TEMPORARIES + 4)
            yield from decode_w2(words[i : i + 2], fragments[i : i + 2], temporaries, 26)
    else:
        for word, fragment in zip(words, fragments, strict=True):
            yield from decode_fp4(word, fragment)
    kind = "E4M3" if kernel.codec == "w2" else "E2M1"
    for i, fragment in enumerate(fragments):
        for half in range(2):
            sums = SUMS + 8 * i + 4 * half
            vector = _VECTORS + 2 * _part(kernel) * half + 2 * step
            scales = f"R{_SCALES + i}, R{_VECTOR_SCALES + half}, {byte}"
            operands = f"R{sums}, R{fragment}, R{vector}, R{sums}, {scales}"
            yield f"  QMMA.SF.16832.F32.{kind}.E4M3.E8 {operands}"


def _part_nv(first: int) -> Iterator[str]:
    """Two steps: each half of a step is a product of its own, multiplied by scales in float32.

    While the matrix unit computes a product, the one before is added up. A lies at R100..R103 with
    the first half and at R104..R107 with the second, else zeros.
    """
    units = [(step, i, half) for step in range(2) for i in range(4) for half in range(2)]
    for number, (step, i, half) in enumerate(units):
        word, target = _CODES + 4 * i + 2 * step + half, 106 if half else 100
        yield f"  SHF.L.U32 R{target}, R{word}, 0x2, RZ"
        yield f"  SHF.R.U32.HI R{target + 1}, RZ, 0x2, R{word}"
        products = _NV_PRODUCTS + 8 * half
        yield from (f"  CS2R R{register}, SRZ" for register in range(products, products + 8, 2))
        yield f"  LOP3.LUT R{target}, R{target}, 0x3c3c3c3c, RZ, 0xc0, !PT"
        yield f"  LOP3.LUT R{target + 1}, R{target + 1}, 0x3c3c3c3c, RZ, 0xc0, !PT"
        yield from _scales_nv(step, i, half)
        byte = ("UR15", "UR12", "UR13", "UR14")[first + step]
        for columns in range(2):
            vector = _VECTORS + 4 * columns + 2 * step
            scales = f"R26, R{_VECTOR_SCALES + columns}, {byte}"
            product = products + 4 * columns
            operands = f"R{product}, R{104 if half else 100}, R{vector}, R{product}, {scales}"
            yield f"  QMMA.SF.16832.F32.E2M1.E4M3.E8 {operands}"
        if number:
            yield from _add_nv(*units[number - 1][1:])
    yield from _add_nv(*units[-1][1:])


def _scales_nv(step: int, i: int, half: int) -> Iterator[str]:
    """The scales of both rows as float32, in turn."""
    both = [
        from_e4m3(_SCALES + 2 * half + row, _NV_SCALES + 2 * i + row, 2 * step + half)
        for row in range(2)
    ]
    yield from (line for lines in zip(*both, strict=True) for line in lines)


def _add_nv(i: int, half: int) -> Iterator[str]:
    """Add the products of half a step of a row block, times the scales of its rows."""
    for place in range(8):
        total, product = SUMS + 8 * i + place, _NV_PRODUCTS + 8 * half + place
        yield f"  FFMA R{total}, R{product}, R{_SCALES + 2 * half + (place >> 1 & 1)}, R{total}"


def _log2(number: int) -> int:
    return number.bit_length() - 1
