"""Warpgroup MMAs of the emulator, and what it refuses around them, in a program of one MMA."""

import struct

import numpy as np
import pytest

from moet_kernels.portable.emulated import emulating
from moet_kernels.sass.arch import SM90A
from moet_kernels.sass.emulate import Launch, emulate
from moet_kernels.sass.errors import EmulationError, Fault
from moet_kernels.sass.machine import Buffer
from moet_kernels.sass.operands import parse
from moet_kernels.sass.source import Program, Statement

A, B, OUT = 1 << 16, 2 << 16, 3 << 16
PROGRAM = """\
S2R R0, SR_TID.X
ULDC.64 UR8, c[0x0][0x208]
LDC.64 R2, c[0x0][0x210]
LDC.64 R4, c[0x0][0x218]
LDC.64 R6, c[0x0][0x220]
IMAD.WIDE.U32 R2, R0, 0x10, R2
IMAD.WIDE.U32 R4, R0, 0x10, R4
IMAD.WIDE.U32 R6, R0, 0x20, R6
LDG.E.128 R16, desc[UR8][R2.64]
CS2R R24, SRZ
CS2R R26, SRZ
CS2R R28, SRZ
CS2R R30, SRZ
ISETP.GE.AND P0, PT, R0, 0x40, PT
UMOV UR4, 0x400
LEA R8, R0, UR4, 0x4
LDGSTS.E.BYPASS.LTC128B.128 [R8], desc[UR8][R4.64]
LDGDEPBAR
DEPBAR.LE SB0, 0x0
MEMBAR.ALL.CTA
FENCE.VIEW.ASYNC.S
BAR.SYNC.DEFER_BLOCKING 0x0
UMOV UR14, 0x10040
UMOV UR15, 0x40000040
WARPGROUP.ARRIVE
HGMMA.64x16x16.F32.BF16 R24, R16, gdesc[UR12], R24, gsb0
WARPGROUP.DEPBAR.LE gsb0, 0x0
STG.E.128 desc[UR8][R6.64], R24
STG.E.128 desc[UR8][R6.64+0x10], R28
EXIT
"""
HGMMA = "HGMMA.64x16x16.F32.BF16 R24, R16, gdesc[UR12], R24, gsb0\n"
COPY = "LDGSTS.E.BYPASS.LTC128B.128 [R8], desc[UR8][R4.64]\n"
BARRIER = "BAR.SYNC.DEFER_BLOCKING 0x0\n"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0\n"


def program(source):
    statements = [
        Statement(parse(text, SM90A, 16 * i), text, 16 * i)
        for i, text in enumerate(source.splitlines())
    ]
    return Program(SM90A, "k", 64, tuple(statements), shared=4096, parameters=24)


def small_numbers(rng, *shape):
    """Whole numbers whose products and sums are exact."""
    return rng.integers(-8, 9, shape).astype(np.float32)


def halves(values):
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def run(*changes):
    """Run the program with changed lines; return A [64, 16], B [16, 64] and D [64, 16]."""
    rng = np.random.default_rng(3)
    a, b = small_numbers(rng, 64, 16), small_numbers(rng, 16, 64)
    fragments = np.zeros((128, 4, 2), np.uint16)
    swizzled = np.zeros((16, 8, 8), np.uint16)
    for thread in range(128):
        row, t = thread // 32 * 16 + thread % 32 // 4, thread % 4
        for register in range(4):
            columns = 2 * t + 8 * (register // 2)
            fragments[thread, register] = halves(a[row + register % 2 * 8, columns : columns + 2])
    for vector in range(16):
        for piece in range(8):
            swizzled[vector, piece ^ vector % 8] = halves(b[vector, 8 * piece : 8 * piece + 8])
    d = np.zeros((64, 16), np.float32)
    for thread, values in enumerate(stored(fragments, swizzled, *changes).view(np.float32)):
        row, t = thread // 32 * 16 + thread % 32 // 4, thread % 4
        for i, value in enumerate(values):
            d[row + i // 2 % 2 * 8, i // 4 * 8 + 2 * t + i % 2] = value
    return a, b, d


def stored(fragments, swizzled, *changes):
    """What each thread has in R24 to R31 when it ends, uint32 [128, 8]."""
    source = PROGRAM
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    out = Buffer.empty(OUT, 128 * 32)
    launch = Launch((1, 1, 1), 128, struct.pack("<3Q", A, B, OUT), most_steps=1000)
    with emulating():
        buffers = [Buffer.of(A, fragments), Buffer.of(B, swizzled), out]
        emulate(program(source), launch, buffers)
    return out.data.view(np.uint32).reshape(128, 8)


@pytest.mark.parametrize("step", range(4))
def test_the_product_of_16_columns(step):
    a, b, d = run(("0x10040", hex(0x10040 + 2 * step)))
    assert (d == a @ b[:, 16 * step : 16 * step + 16].T).all()


def test_a_group_adds_to_the_same_accumulators():
    load = "LDG.E.128 R16, desc[UR8][R2.64]\n"
    first = HGMMA.replace(", gsb0", "").replace("R16", "R20")
    both = first + "UIADD3.64 UR14, UR14, 0x2, URZ\n" + HGMMA
    a, b, d = run((load, load + load.replace("R16", "R20")), (HGMMA, both))
    assert (d == a @ b[:, :16].T + a @ b[:, 16:32].T).all()


def test_vectors_that_nothing_wrote_are_no_numbers():
    a, b, d = run(("LDGSTS", "@!P0 LDGSTS"))
    assert (d[:, :8] == a @ b[:8, :16].T).all()
    assert np.isnan(d[:, 8:]).all()


def test_uiadd3_carries_into_the_high_word():
    halved = "UMOV UR14, 0xffffffff\nUMOV UR15, 0x4000003f\nUIADD3.64 UR14, UR14, 0x10041, URZ\n"
    a, b, d = run(("UMOV UR14, 0x10040\nUMOV UR15, 0x40000040\n", halved))
    assert (d == a @ b[:, :16].T).all()


def test_groups_of_8_vectors_lie_as_far_apart_as_the_descriptor_says():
    a, b, d = run(("0x40000040", "0x40000080"))
    assert (d[:, :8] == a @ b[:8, :16].T).all()
    assert np.isnan(d[:, 8:]).all(), "nothing was written that far behind"


def test_what_an_ended_group_had_is_free_while_the_next_is_under_way():
    both = HGMMA.replace("R16", "R20") + HGMMA
    load = "LDG.E.128 R16, desc[UR8][R2.64]\n"
    early = WAIT.replace("0x0", "0x1") + "MOV R20, R0\n" + WAIT
    a, b, d = run((load, load + load.replace("R16", "R20")), (HGMMA, both), (WAIT, early))
    assert (d == 2 * a @ b[:, :16].T).all()


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("MOV R24, 0x1000001\nI2F.RP R24, R24", np.float32(16777218.0).view(np.uint32)),
        ("MOV R24, 0xfeffffff\nI2F.RP R24, R24", np.float32(-16777216.0).view(np.uint32)),
        ("MOV R24, 0x40300000\nF2I.FTZ.U32.TRUNC.NTZ R24, R24", 2),  # 2.75
        ("MOV R24, 0xbf800000\nF2I.FTZ.U32.TRUNC.NTZ R24, R24", 0),  # -1
        ("MOV R24, 0x7f800000\nF2I.FTZ.U32.TRUNC.NTZ R24, R24", 0xFFFFFFFF),  # infinity
        ("STL [R1+0x4], R15\nMOV R24, 0x7\nSTL [R1+0x4], R24\nLDL R24, [R1+0x4]", 7),
    ],
)
def test_other_instructions_of_prefill(body, wanted):
    nothing = np.zeros((128, 8), np.uint16)
    assert (stored(nothing, nothing, (WAIT, WAIT + body + "\n"))[:, 0] == wanted).all()


@pytest.mark.parametrize(
    ("old", "new", "fault", "said"),
    [
        (WAIT, "", Fault.IN_FLIGHT, "R24 is the accumulator of an MMA that was not waited for"),
        (WAIT, WAIT.replace("0x0", "0x1"), Fault.IN_FLIGHT, "R24 is the accumulator"),
        (", gsb0", "", Fault.IN_FLIGHT, "R24 is the accumulator"),
        (WAIT, "CS2R R30, SRZ\n" + WAIT, Fault.IN_FLIGHT, "R30 is the accumulator"),
        (WAIT, "MOV R19, R0\n" + WAIT, Fault.IN_FLIGHT, "R19 is part of A of an MMA"),
        (WAIT, "MOV R0, R19\n" + WAIT, Fault.IN_FLIGHT, "R19 is part of A of an MMA"),
        (HGMMA, HGMMA + HGMMA, Fault.IN_FLIGHT, "R16 is part of A of an MMA"),
        (HGMMA, HGMMA + HGMMA.replace("R16", "R28"), Fault.IN_FLIGHT, "R28 is the accumulator"),
        (
            HGMMA,
            HGMMA + HGMMA.replace("R24", "R12").replace("R16", "R20"),
            Fault.IN_FLIGHT,
            "R16 is part of A",
        ),
        (
            HGMMA + WAIT,
            HGMMA + HGMMA.replace("R16", "R20") + WAIT.replace("0x0", "0x1"),
            Fault.IN_FLIGHT,
            "R24 is the accumulator",
        ),
        (HGMMA, "MOV R17, R0\n" + HGMMA, Fault.IN_FLIGHT, "R17 was written after the last"),
        (HGMMA, "CS2R R24, SRZ\n" + HGMMA, Fault.IN_FLIGHT, "R24 was written after the last"),
        ("WARPGROUP.ARRIVE\n", "", Fault.IN_FLIGHT, "was written after the last"),
        (WAIT, "STS [R8], R0\n" + WAIT, Fault.IN_FLIGHT, "MMAs that read this shared memory"),
        (WAIT, COPY + WAIT, Fault.IN_FLIGHT, "MMAs that read this shared memory"),
        (WAIT, WAIT + "STS [R8], R0\n", Fault.RACE, "no barrier in between"),
        (WAIT, WAIT + COPY, Fault.RACE, "no barrier in between"),
        ("WARPGROUP.ARRIVE\n", f"STS [R8], R0\n{BARRIER}WARPGROUP.ARRIVE\n", Fault.RACE, "fenced"),
        ("LDC.64 R4, c[0x0][0x218]", "LDC.64 R4, c[0x0][0x220]", Fault.UNINITIALISED, "never"),
        (
            "DEPBAR.LE SB0, 0x0\nMEMBAR.ALL.CTA\nFENCE.VIEW.ASYNC.S\n" + BARRIER,
            BARRIER + "DEPBAR.LE SB0, 0x0\nFENCE.VIEW.ASYNC.S\n",
            Fault.RACE,
            "what the MMA reads was written with no barrier",
        ),
        (WAIT, WAIT + "LDL R24, [R1]\n", Fault.UNINITIALISED, "never written"),
        ("DEPBAR.LE SB0, 0x0", "NOP", Fault.IN_FLIGHT, "copies to what the MMA reads"),
        ("DEPBAR.LE SB0, 0x0", "DEPBAR.LE SB0, 0x1", Fault.IN_FLIGHT, "copies to what the MMA"),
        ("FENCE.VIEW.ASYNC.S\n", "", Fault.RACE, "was not fenced by the thread that wrote it"),
        ("FENCE.VIEW", "@P0 FENCE.VIEW", Fault.RACE, "was not fenced by the thread"),
        ("LDGDEPBAR\n", "LDGDEPBAR\nFENCE.VIEW.ASYNC.S\n@P0 ", Fault.IN_FLIGHT, "copies to what"),
        (BARRIER, "", Fault.RACE, "with no barrier in between"),
        (HGMMA, "@P0 " + HGMMA, Fault.DEADLOCK, "needs all 128 threads"),
        ("0x10040", "0x10140", Fault.OUT_OF_BOUNDS, "outside of shared memory"),
        ("0x40000040", "0x40", Fault.UNSUPPORTED, "without a swizzle of 128 bytes"),
        ("0x40000040", "0x40020040", Fault.UNSUPPORTED, "with an offset"),
    ],
)
def test_what_hardware_leaves_undefined_is_an_error(old, new, fault, said):
    with pytest.raises(EmulationError, match=said) as caught:
        run((old, new))
    assert caught.value.fault == fault


def test_shared_memory_may_be_written_after_a_wait_and_a_barrier():
    a, b, d = run((WAIT, WAIT + BARRIER + "STS [R8], R0\n"))
    assert (d == a @ b[:, :16].T).all()
