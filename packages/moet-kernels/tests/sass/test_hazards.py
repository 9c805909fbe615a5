import msgspec
import pytest

from moet_kernels.sass.cases import kernel_source
from moet_kernels.sass.control import LONGEST_STALL
from moet_kernels.sass.faults import seeded_faults, with_fault
from moet_kernels.sass.hazards import check_hazards
from moet_kernels.sass.schedule import safe, tuned
from moet_kernels.sass.source import parse_source
from moet_kernels.sass.table import committed_table
from moet_kernels.sass.timing import needed, needed_alone

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


def test_memory_used_before_a_barrier_is_over(header, table):
    body = (
        "[B------:R-:W-:Y:S15] MOV R4, 0x400\n[B------:R-:W-:{}] BAR.SYNC.DEFER_BLOCKING 0x0\n"
        "[B------:R-:W0:Y:S05] LDS R0, [R4]\n[B0-----:R-:W-:Y:S05] EXIT\n"
    )
    assert kinds(header + body.format("-:S01"), table) == {"fixed latency"}
    assert kinds(header + body.format("-:S06"), table) == set()


READ_LATE = (
    "[B------:R-:W-:Y:S13] MOV R4, 0x400\n[B------:R-:W-:Y:S13] MOV R5, 0x400\n"
    "[B------:R0:W-:Y:S13] STS [R4], RZ\n[B------:R1:W-:Y:S13] STS [R5], RZ\n"
    + "[B------:R-:W-:Y:S13] NOP\n" * 9
    + "[B{}:R-:W-:Y:S05] MOV R4, 0x0\n[B------:R-:W-:Y:S05] EXIT\n"
)


def test_no_number_of_cycles_replaces_the_wait_for_a_late_read(header, table):
    assert kinds(header + READ_LATE.format("------"), table) == {
        "source overwritten before it is read"
    }
    assert kinds(header + READ_LATE.format("0-----"), table) == set()


def test_memory_instructions_read_their_sources_in_order(header, table):
    # The second store has read, so the first one has.
    assert kinds(header + READ_LATE.format("-1----"), table) == set()


def test_what_the_compiler_never_showed_waits_longest(table):
    assert needed(table.timing, "NEVER/R>SEEN:1") == LONGEST_STALL
    assert needed(table.timing, "NEVER/R>SEEN:1~") == LONGEST_STALL


def test_cycles_left_beside_a_wait_are_no_evidence_without_one(table):
    timing = msgspec.structs.replace(table.timing, raw={"A/R>B:1~": 2, "A/R>B:2": 5})
    assert needed(timing, "A/R>B:1~") == 2
    assert needed(timing, "A/R>B:1") == needed_alone(timing, "A/R>B:1~") == 5


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
