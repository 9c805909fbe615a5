import msgspec
import pytest

from moet_kernels.sass.cases import kernel_source
from moet_kernels.sass.control import Control, parse_control
from moet_kernels.sass.errors import SassError
from moet_kernels.sass.operands import parse
from moet_kernels.sass.precedent import seen_marks, unprecedented
from moet_kernels.sass.schedule import safe, tuned
from moet_kernels.sass.table import committed_table

PLAIN = Control(4)


def said(text, arch, control=PLAIN, table=None):
    return list(unprecedented(parse(text, arch), control, table or committed_table(arch)))


def table_of(texts, arch):
    """A table with one form, whose marks are those of these instructions alone."""
    instructions = [parse(text, arch) for text in texts]
    (key,) = {instruction.key for instruction in instructions}
    table = committed_table(arch)
    form = msgspec.structs.replace(table.forms[key], marks=seen_marks(instructions, arch))
    return msgspec.structs.replace(table, forms={key: form})


@pytest.mark.parametrize(
    ("shown", "asked", "message"),
    [
        (["FADD R1, R2, R3"], "FADD R9, R2, R7", []),
        (["FADD R1, R2, R3"], "FADD R1, -R2, R3", ["never has a minus sign on operand 2"]),
        (["FADD R1, -R2, R3"], "FADD R1, R2, R3", ["always has a minus sign on operand 2"]),
        (["FADD R1, R2, R3"], "FADD R1, R2, |R3|", ["never has absolute bars on operand 3"]),
        (["FADD R1, R2, R3"], "FADD R1, R2.reuse, R3", ["never has .reuse on operand 2"]),
        (["FADD R1, R2, R3"], "FADD RZ, R2, R3", ["never has RZ in operand 1"]),
        (
            ["FADD R1, R2, R3", "FADD R1, -RZ, R3"],
            "FADD R1, RZ, R3",
            [],  # each mark was seen, if not both together
        ),
        (
            ["ISETP.GE.AND P0, PT, R1, R2, PT"],
            "ISETP.GE.AND P0, P1, R1, R2, !P2",
            [
                "always has PT in operand 2",
                "always has PT in operand 5",
                "never has a negation on operand 5",
            ],
        ),
        (
            ["STG.E desc[UR8][R2.64], R4"],
            "STG.E desc[UR8][RZ.64], R4.reuse",
            ["never has RZ in operand 1", "never has .reuse on operand 2"],
        ),
        (["STG.E desc[UR8][R2.64], R4"], "STG.E desc[UR4][R6.64+0x10], R8", []),
    ],
)
def test_marks(shown, asked, message, arch):
    found = said(asked, arch, table=table_of(shown, arch))
    assert found == [f"compiled code {part} of this form." for part in message]


def test_the_guard_is_free(arch):
    table = table_of(["FADD R1, R2, R3"], arch)
    assert said("@!P3 FADD R1, R2, R3", arch, table=table) == []


def test_scoreboards(arch):
    text = "FADD R1, R2, R3"
    assert said(text, arch, Control(4)) == []
    (message,) = said(text, arch, Control(4, write=0))
    assert message == "it takes scoreboards 'W'; compiled code has '' on FADD."


def test_a_load_may_take_a_scoreboard_for_its_result(arch):
    text = "LDG.E R4, desc[UR8][R2.64]"
    assert said(text, arch, Control(4, write=0)) == []
    assert said(text, arch, Control(4, write=0, read=1)) == []


@pytest.mark.parametrize("pace", ["Y:S15", "Y:S01"])
def test_a_stall_that_no_compiler_wrote(pace, arch):
    control = parse_control(f"B------:R-:W-:{pace}")
    (message,) = said("FADD R1, R2, R3", arch, control)
    assert message == f"{pace}; no compiled instruction has this stall with this hold bit."


def test_a_scoreboard_that_does_not_exist(arch):
    found = said("LDG.E R4, desc[UR8][R2.64]", arch, Control(4, write=6))
    assert found == ["write scoreboard 6; there are 6."]


@pytest.mark.parametrize("name", ["copy", "w2_gemm_bf16", "w2_gemm_e4m3"])
@pytest.mark.parametrize("schedule", [safe, tuned])
def test_our_kernels_have_precedent(name, schedule):
    program = kernel_source(name)
    table = committed_table(program.arch)
    found = [
        (statement.text, message)
        for statement in schedule(program, table).statements
        for message in unprecedented(statement.instruction, statement.control, table)
    ]
    assert found == []


def test_an_unknown_form_is_an_error(arch):
    with pytest.raises(SassError, match="no compiled code has the form"):
        said("FROB R1, R2", arch)
