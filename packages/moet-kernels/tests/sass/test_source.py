import pytest

from moet_kernels.sass.assemble import assemble
from moet_kernels.sass.errors import Flaw, SourceError
from moet_kernels.sass.schedule import safe, tuned
from moet_kernels.sass.source import parse_source, write_source

OK = "[B------:R-:W-:Y:S05] "


def flaw_of(text, table):
    with pytest.raises(SourceError) as caught:
        assemble(parse_source(text), table)
    return caught.value


@pytest.mark.parametrize(
    ("line", "flaw", "column"),
    [
        (OK + "FROB R1, R2", Flaw.UNKNOWN_FORM, 23),
        (OK + "IADD3 R1, R2, 0x100000000, RZ", Flaw.OPERAND, 23),
        (OK + "LDC.64 R3, c[0x0][0x210]", Flaw.ALIGNMENT, 23),
        (OK + "MOV R32, R2", Flaw.REGISTER_BOUND, 23),
        ("[B------:R-:W-:-:S12] EXIT", Flaw.CONTROL, 1),
        ("EXIT", Flaw.CONTROL, 1),
        (OK + "BRA nowhere", Flaw.LABEL, 27),
        (".registers 32", Flaw.DIRECTIVE, 1),
    ],
)
def test_each_flaw_is_named_with_its_place(line, flaw, column, header, table):
    error = flaw_of(header + line + "\n", table)
    assert (error.flaw, error.line, error.column) == (flaw, 6, column)


@pytest.mark.parametrize("schedule", [safe, tuned])
def test_an_unknown_form_has_its_place_before_it_is_scheduled(schedule, header, table):
    program = parse_source(header + "MOV R1, RZ\n  FROB R1, R2\n")
    with pytest.raises(SourceError) as caught:
        schedule(program, table)
    error = caught.value
    assert (error.flaw, error.line, error.column) == (Flaw.UNKNOWN_FORM, 7, 3)


def test_labels_are_addresses(header, table):
    text = header + f"loop:\n{OK}NOP\n{OK}BRA loop\n"
    program = parse_source(text)
    assert program.statements[1].instruction.operands[0].values == ((1 << 64) - 32,)
    assert parse_source(write_source(program)).statements[1].text == "BRA 0x0"


def test_written_source_assembles_to_the_same_words(header, table):
    program = safe(parse_source(header + "top:\nS2R R0, SR_TID.X\n@P0 BRA top\nEXIT\n"), table)
    again = parse_source(write_source(program))
    assert assemble(again, table) == assemble(program, table)
