import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet_kernels.sass.control import Control, parse_control
from moet_kernels.sass.errors import SassError

BOARD = st.sampled_from([0, 1, 2, 3, 4, 5, 7])
CONTROLS = st.builds(Control, st.integers(1, 11), st.booleans(), BOARD, BOARD, st.integers(0, 63))


@given(CONTROLS)
def test_text_and_bits_read_back(control):
    assert parse_control(control.text) == control
    assert Control.of(control.bits) == control


def test_bits_of_a_compiled_word():
    # LEA R0, R2, R0, 0x8 behind two S2R: waits for scoreboard 0, stall 4.
    assert Control.of(0x001FC800_078E40FF_00000000_02007211).text == "B0-----:R-:W-:Y:S04"


@pytest.mark.parametrize(
    "text",
    [
        "B------:R-:W-:-:S12",
        "B------:R6:W-:Y:S01",
        "B1-----:R-:W-:Y:S01",
        "B------:R-:W-:Y:S16",
        "",
    ],
)
def test_bad_fields_are_refused(text):
    with pytest.raises(SassError):
        parse_control(text)
