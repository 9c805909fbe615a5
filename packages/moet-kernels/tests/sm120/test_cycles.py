"""The cycle model on small programs whose time can be worked out by hand."""

import msgspec
import numpy as np
import pytest

from moet_kernels.sass.arch import SM120A
from moet_kernels.sass.schedule import safe, tuned
from moet_kernels.sass.source import parse_source
from moet_kernels.sass.table import committed_table
from moet_kernels.sm120.cases import CODECS, launch_of, make_case
from moet_kernels.sm120.cycles import Op, Processor, predict, trace
from moet_kernels.sm120.write import KERNELS, sass_source

GPU = Processor(name="a GPU", count=2, clock=1.0, bandwidth=1e11, launch=0.0)
HEAD = ".arch sm_120a\n.kernel k\n.registers 16\n.parameters 8\n"


def program(*lines):
    return parse_source(HEAD + "\n".join(lines) + "\n")


def alone(found, warps, *, blocks=1, gpu=GPU, **options):
    return predict(found, warps, gpu, blocks=blocks, shared=0, registers=18, **options)


def run(found, count, *, blocks=1, gpu=GPU):
    ops = [Op(i, 0, 0, branches=False) for i in range(len(found.statements))]
    return alone(found, [ops] * count, blocks=blocks, gpu=gpu)


def test_stalls_add_up():
    found = program("[B------:R-:W-:-:S04] MOV R0, 0x1", "[B------:R-:W-:-:S07] MOV R2, R0")
    assert run(found, 1).cycles == 11


def test_a_wait_lasts_until_the_result_arrives():
    found = program(
        "[B------:R-:W0:-:S01] LDC R0, c[0x0][0x380]", "[B0-----:R-:W-:-:S01] MOV R2, R0"
    )
    assert run(found, 1).cycles == 41


def test_a_pipe_is_shared_by_the_warps_of_a_scheduler():
    lines = ["[B------:R-:W-:-:S01] LOP3.LUT R0, R0, R1, RZ, 0xc0, !PT"] * 100
    four, eight = (run(program(*lines), warps).cycles for warps in (4, 8))
    assert four == pytest.approx(200, abs=4)  # one warp on each scheduler, two cycles each
    assert eight == pytest.approx(400, abs=4)


def test_memory_gives_what_it_has():
    found = program("[B------:R-:W0:-:S01] LDC R0, c[0x0][0x380]")
    loads = [[Op(0, 512, 0, branches=False)] * 100] * 4
    prediction = alone(found, loads, blocks=2)
    assert prediction.memory_bytes == 2 * 4 * 100 * 512
    assert prediction.microseconds == pytest.approx(prediction.memory_bytes / 1e11 * 1e6, rel=0.1)


def test_blocks_wait_for_room():
    lines = ["[B------:R-:W-:Y:S13] MOV R0, R1"] * 50
    gpu = msgspec.structs.replace(GPU, warps=8)
    one, four = (run(program(*lines), 4, blocks=n, gpu=gpu) for n in (2, 8))
    assert one.resident == four.resident == 2
    assert four.cycles == pytest.approx(2 * one.cycles, rel=0.05)


@pytest.mark.parametrize(("name", "bits"), [("w2_down", 2.25), ("nv_down", 4.5)])
def test_a_traced_kernel_reads_its_rows_once(name, bits):
    (kernel,) = (kernel for kernel in KERNELS if kernel.name == name)
    case = make_case(CODECS[kernel.codec], 64, 512, (1,), 0, down=True, exact=True)
    launch, buffers = launch_of(case)
    table = committed_table(SM120A)
    source = parse_source(sass_source(kernel))
    rows = buffers[3].address
    found = {}
    for name, schedule in (("safe", safe), ("tuned", tuned)):
        scheduled = schedule(source, table)
        warps = trace(scheduled, launch, buffers, lambda address: address == rows)
        assert len(warps) == 8
        prediction = predict(scheduled, warps, GPU, blocks=2, shared=8448, registers=64)
        assert prediction.resident == 4
        factor = 32 if kernel.codec == "nv" else 0  # a sector with the tensor scale, a warp each
        assert prediction.memory_bytes == 2 * (64 * 512 * bits / 8 + 8 * factor)
        found[name] = prediction.cycles
    assert found["tuned"] < found["safe"]
    assert np.isfinite(found["safe"])
