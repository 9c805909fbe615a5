import msgspec
import pytest

from moet_kernels.sass.cases import kernel_source
from moet_kernels.sass.faults import seeded_faults, with_fault
from moet_kernels.sass.hazards import check_hazards
from moet_kernels.sass.schedule import safe, tuned
from moet_kernels.sass.source import parse_source
from moet_kernels.sass.table import committed_table

CHAIN = "{first}\n[B{wait}:R-:W-:Y:S05] IADD3 R3, R0, R0, RZ\n[B------:R-:W-:Y:S05] EXIT\n"


def kinds(text, table):
    return {hazard.kind for hazard in check_hazards(parse_source(text), table)}


@pytest.mark.parametrize("name", ["copy", "w2_gemm_bf16", "w2_gemm_e4m3"])
@pytest.mark.parametrize("schedule", [safe, tuned])
def test_schedules_leave_no_hazard(name, schedule):
    program = kernel_source(name)
    table = committed_table(program.arch)
    assert check_hazards(schedule(program, table), table) == []


def test_a_missing_wait(header, table):
    first = "[B------:R-:W0:Y:S05] S2R R0, SR_TID.X"
    assert kinds(header + CHAIN.format(first=first, wait="------"), table) == {
        "result on a scoreboard"
    }
    assert kinds(header + CHAIN.format(first=first, wait="0-----"), table) == set()


def test_a_scoreboard_waited_for_at_once(header, table):
    first = "[B------:R-:W0:-:S01] S2R R0, SR_TID.X"
    assert kinds(header + CHAIN.format(first=first, wait="0-----"), table) == {
        "scoreboard waited for before it is taken"
    }


def test_a_short_fixed_latency(header, table):
    first = "[B------:R-:W-:-:S01] MOV R0, 0x7"
    assert kinds(header + CHAIN.format(first=first, wait="------"), table) == {"fixed latency"}


def test_an_overwritten_source(header, table):
    body = (
        "[B------:R-:W-:Y:S15] MOV R4, 0x400\n[B------:R{}:W-:Y:S05] STS [R4], RZ\n"
        "[B{}:R-:W-:Y:S05] MOV R4, 0x0\n[B------:R-:W-:Y:S05] EXIT\n"
    )
    assert kinds(header + body.format("-", "------"), table) == {
        "source overwritten before it is read"
    }
    assert kinds(header + body.format("0", "0-----"), table) == set()


def test_a_result_that_arrived_says_that_the_source_was_read():
    # Compiled code of sm_120a never gives LDS both scoreboards; the one for its result must do.
    text = (
        ".arch sm_120a\n.kernel k\n.registers 32\n"
        "MOV R10, 0x400\nLDS R20, [R10]\nMOV R10, RZ\nEXIT\n"
    )
    program = parse_source(text)
    _, load, overwrite, _ = tuned(program, committed_table(program.arch)).statements
    assert load.control.boards == "W"
    assert overwrite.control.wait == 1 << load.control.write


def test_a_branch_needs_its_stall(header, table):
    assert kinds(header + "[B------:R-:W-:-:S01] EXIT\n", table) == {"short stall"}


def test_every_removed_wait_of_a_tuned_kernel_is_found():
    program = kernel_source("w2_gemm_bf16")
    table = committed_table(program.arch)
    program = tuned(program, table)
    removed = [fault for fault in seeded_faults(program) if fault.kind == "wait removed"]
    assert len(removed) > 10
    for fault in removed[::3]:
        assert check_hazards(with_fault(program, fault), table), msgspec.to_builtins(fault)
