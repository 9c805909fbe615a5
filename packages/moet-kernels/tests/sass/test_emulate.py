import struct

import numpy as np
import pytest

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
    error = fault(header, "MUFU.RCP R0, R1\nEXIT\n")
    assert (error.fault, "MUFU" in str(error)) == (Fault.UNSUPPORTED, True)
