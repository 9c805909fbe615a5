import struct

import numpy as np
import pytest

from moet_core.floats import float64_to_e4m3
from moet_kernels.sass.emulate import Launch, emulate
from moet_kernels.sass.errors import EmulationError, Fault
from moet_kernels.sass.machine import Buffer
from moet_kernels.sass.source import parse_source

OUT = 1 << 16
ADDRESS = """
S2R R0, SR_TID.X
ULDC.64 UR8, c[0x0][0x208]
LDC.64 R2, c[0x0][0x210]
IMAD.WIDE.U32 R2, R0, 0x4, R2
"""
SHARED = """
S2R R0, SR_TID.X
UMOV UR4, 0x400
LEA R4, R0, UR4, 0x2
"""


def run(header, body, threads=64, size=256):
    buffers = [Buffer.empty(OUT, size)]
    launch = Launch((1, 1, 1), threads, struct.pack("<Q", OUT), most_steps=1000)
    emulate(parse_source(header + body), launch, buffers)
    return buffers[0]


def fault(header, body, **more):
    with pytest.raises(EmulationError) as caught:
        run(header, body, **more)
    return caught.value


def test_each_thread_stores_its_number(header):
    out = run(header, ADDRESS + "STG.E desc[UR8][R2.64], R0\nEXIT\n")
    assert (out.data.view(np.uint32) == np.arange(64)).all()
    assert out.written.all()


def test_threads_that_part_meet_again(header):
    body = ADDRESS + (
        "LOP3.LUT R4, R0, 0x1, RZ, 0xc0, !PT\nISETP.NE.AND P0, PT, R4, RZ, PT\n@P0 BRA odd\n"
        "MOV R5, 0x64\nBRA both\nodd:\nMOV R5, 0xc8\nboth:\n"
        "STG.E desc[UR8][R2.64], R5\nEXIT\n"
    )
    values = run(header, body).data.view(np.uint32)
    assert (values == np.where(np.arange(64) % 2, 200, 100)).all()


def test_out_of_bounds_names_instruction_and_thread(header):
    error = fault(header, ADDRESS + "STG.E desc[UR8][R2.64], R0\nEXIT\n", size=128)
    assert (error.fault, error.address, error.thread) == (Fault.OUT_OF_BOUNDS, 0x40, (0, 32))


def test_a_register_nobody_wrote(header):
    error = fault(header, ADDRESS + "STG.E desc[UR8][R2.64], R9\nEXIT\n")
    assert (error.fault, error.thread) == (Fault.UNINITIALISED, (0, 0))


def test_memory_nobody_wrote(header):
    error = fault(header, ADDRESS + "LDG.E R4, desc[UR8][R2.64]\nEXIT\n")
    assert error.fault == Fault.UNINITIALISED


def test_misaligned(header):
    error = fault(header, ADDRESS + "STG.E desc[UR8][R2.64+0x2], R0\nEXIT\n")
    assert error.fault == Fault.MISALIGNED


def test_reading_another_warps_word_without_a_barrier_is_a_race(header):
    body = SHARED + "LOP3.LUT R5, R4, 0x80, RZ, 0x3c, !PT\nSTS [R4], R0\n{}LDS R6, [R5]\nEXIT\n"
    assert fault(header, body.format("")).fault == Fault.RACE
    run(header, body.format("BAR.SYNC.DEFER_BLOCKING 0x0\n"))


def test_one_word_written_by_two_threads_is_a_race(header):
    body = SHARED + "STS [UR4], R0\nEXIT\n"
    assert fault(header, body, threads=32).fault == Fault.RACE


def test_a_barrier_that_some_threads_never_reach(header):
    body = (
        "S2R R0, SR_TID.X\nISETP.GE.AND P0, PT, R0, 0x20, PT\nhere:\n@P0 BRA here\n"
        "BAR.SYNC.DEFER_BLOCKING 0x0\nEXIT\n"
    )
    assert fault(header, body).fault == Fault.RUNAWAY


def test_threads_that_wait_at_a_barrier_and_at_a_meeting_point_hang(header):
    body = (
        "S2R R0, SR_TID.X\nISETP.GE.AND P0, PT, R0, 0x10, PT\nBSSY B0, meet\n@P0 BRA bar\n"
        "BRA meet\nbar:\nBAR.SYNC.DEFER_BLOCKING 0x0\nmeet:\nBSYNC B0\nEXIT\n"
    )
    error = fault(header, body, threads=32)
    assert error.fault == Fault.DEADLOCK


def test_unknown_instructions_are_named(header):
    error = fault(header, "MUFU.SIN R0, R1\nEXIT\n")
    assert (error.fault, "MUFU" in str(error)) == (Fault.UNSUPPORTED, True)


def on_every_thread(header, body):
    """What a body leaves in R4; R0 is the thread, R5 its number as a float."""
    body = f"I2FP.F32.U32 R5, R0\n{body}\nSTG.E desc[UR8][R2.64], R4\nEXIT\n"
    return run(header, ADDRESS + body).data.view(np.uint32)


def test_special_functions_round_to_nearest(header):
    thread = np.arange(64)
    found = on_every_thread(header, "MUFU.EX2 R4, R5").view(np.float32)
    assert (found == np.exp2(thread).astype(np.float32)).all()
    found = on_every_thread(header, "MUFU.RCP R4, R5").view(np.float32)
    assert (found[1:] == (1 / thread[1:]).astype(np.float32)).all()
    assert found[0] == np.inf


def test_two_e4m3_in_a_register(header):
    found = on_every_thread(
        header, "MOV R6, 0xc3e00000\nF2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R4, R6, R5, RZ"
    )
    want = float64_to_e4m3(np.arange(64.0)) | np.uint32(0xFE00)  # -448 above
    assert (found == want).all()


def test_moves_and_choices_of_64_bits_take_both_registers(header):
    both = "MOV R6, 0x7\nMOV R7, 0x9\n"
    assert (on_every_thread(header, both + "MOV.64 R8, R6\nIADD R4, R8, R9") == 16).all()
    chosen = both + (
        "CS2R R10, SRZ\nISETP.GE.U32.AND P0, PT, R0, 0x20, PT\n"
        "SEL.64 R8, R6, R10, P0\nIADD R4, R8, R9"
    )
    assert (on_every_thread(header, chosen) == np.where(np.arange(64) < 32, 0, 16)).all()


def test_sums_of_64_bits_carry_inside_and_have_no_carry_of_their_own(header):
    low = "UMOV UR4, 0xffffffff\nUMOV UR5, 0x6\n"
    add = "UIADD3.64 UR4, {}, UPT, UR4, 0x3, URZ\nMOV R6, UR4\nMOV R7, UR5\nIADD R4, R6, R7"
    assert (on_every_thread(header, low + add.format("UPT")) == 2 + 7).all()
    error = fault(header, low + add.format("UP0") + "\nEXIT\n")
    assert (error.fault, "carry" in str(error)) == (Fault.UNSUPPORTED, True)
