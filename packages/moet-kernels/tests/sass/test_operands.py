import pytest

from moet_kernels.sass.arch import SM90A, SM120A
from moet_kernels.sass.errors import SassError
from moet_kernels.sass.operands import NO_PREDICATE, parse


def test_a_key_leaves_only_numbers_open():
    one = parse("@!P0 IADD3 R4, R2.reuse, -R3, 0x10", SM90A)
    other = parse("@P3 IADD3 R9, R2, R8, 0xff", SM90A)
    assert one.key == other.key == "@P IADD3 R,R,R,I"
    assert one.slots != other.slots


def test_slots_are_guard_then_operands():
    found = parse("@!P0 ISETP.GE.AND P1, PT, R4, UR7, !P2", SM90A)
    assert found.slots == (1, 0, 1, 0, NO_PREDICATE, 0, 4, 0, 0, 0, 0, 7, 0, 0, 0, 0, 2, 1)


def test_a_missing_offset_is_zero():
    bare = parse("LDG.E R4, desc[UR8][R2.64]", SM90A)
    assert bare.key == parse("LDG.E R4, desc[UR8][R2.64+0x10]", SM90A).key
    assert bare.operands[1].values == (8, 2, 0)


def test_branch_targets_are_distances():
    assert parse("BRA 0x100", SM90A, 0x100).operands[0].values == ((1 << 64) - 16,)


def test_urz_has_each_architectures_number():
    numbers = [parse("UMOV UR4, URZ", a).operands[1].values[0] for a in (SM90A, SM120A)]
    assert numbers == [63, 255]


def test_reuse_and_flags_of_an_absolute_operand():
    operand = parse("FADD R1, -|R2|.reuse, R3", SM90A).operands[1]
    assert (operand.negate, operand.absolute, operand.reuse) == (True, True, (True,))


@pytest.mark.parametrize(
    ("text", "bits"), [("1.5", 0x3FC00000), ("-INF", 0xFF800000), ("0f7fc00001", 0x7FC00001)]
)
def test_immediate_floats_are_bits(text, bits):
    assert parse(f"FADD R1, R2, {text}", SM90A).operands[2].values == (bits,)


@pytest.mark.parametrize("text", ["", "iadd3 r1, r2", "FADD R1, R2, +QNAN"])
def test_what_is_no_instruction_is_refused(text):
    with pytest.raises(SassError, match="no instruction"):
        parse(text, SM90A)
