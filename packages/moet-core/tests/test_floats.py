from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet_core import floats

FINITE_E4M3 = [byte for byte in range(256) if byte & 0x7F != 0x7F]


def test_e2m1_values():
    expected = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert floats.E2M1_VALUES.tolist() == expected
    assert np.signbit(floats.E2M1_VALUES[8])


def test_low_nibble_is_the_even_column():
    packed = np.array([[0x21, 0x43]], dtype=np.uint8)
    assert floats.split_nibbles(packed).tolist() == [[1, 2, 3, 4]]


@given(st.binary(min_size=1, max_size=64))
def test_join_undoes_split(data):
    packed = np.frombuffer(data, dtype=np.uint8)[None]
    np.testing.assert_array_equal(floats.join_nibbles(floats.split_nibbles(packed)), packed)


@pytest.mark.parametrize(
    ("byte", "value"),
    [
        (0x00, 0.0),
        (0x01, 2.0**-9),
        (0x07, 7 * 2.0**-9),
        (0x08, 2.0**-6),
        (0x38, 1.0),
        (0x48, 4.0),
        (0x7E, 448.0),
        (0xB8, -1.0),
    ],
)
def test_e4m3_values(byte, value):
    assert floats.E4M3_VALUES[byte] == value


def test_e4m3_has_two_nans_and_no_infinity():
    assert np.flatnonzero(np.isnan(floats.E4M3_VALUES)).tolist() == [0x7F, 0xFF]
    assert not np.isinf(floats.E4M3_VALUES).any()


def test_e4m3_encode_inverts_decode():
    decoded = floats.E4M3_VALUES[FINITE_E4M3]
    assert floats.float64_to_e4m3(decoded).tolist() == FINITE_E4M3


@pytest.mark.parametrize("lower", range(0x7E))
def test_e4m3_midpoints_go_to_the_even_byte(lower):
    middle = (floats.E4M3_VALUES[lower] + floats.E4M3_VALUES[lower + 1]) / 2
    below, above = np.nextafter(middle, 0), np.nextafter(middle, 500)
    even = lower + lower % 2
    encoded = floats.float64_to_e4m3(np.array([below, middle, above, -middle]))
    assert encoded.tolist() == [lower, even, lower + 1, even | 0x80]


def test_e4m3_saturates_and_keeps_nan():
    values = np.array([449.0, 1e300, np.inf, -np.inf, np.nan])
    assert floats.float64_to_e4m3(values).tolist() == [0x7E, 0x7E, 0x7E, 0xFE, 0x7F]


@pytest.mark.parametrize(("byte", "value"), [(0, 2.0**-127), (127, 1.0), (254, 2.0**127)])
def test_e8m0_values(byte, value):
    assert floats.e8m0_to_float64(np.array([byte], dtype=np.uint8)) == value


def test_e8m0_255_is_nan():
    assert np.isnan(floats.e8m0_to_float64(np.array([255], dtype=np.uint8)))


def test_bf16_values():
    bits = np.array([0x3F80, 0xC000, 0x0001, 0x8000], dtype=np.uint16)
    assert floats.bf16_to_float32(bits).tolist() == [1.0, -2.0, 2.0**-133, -0.0]


@given(st.floats(width=32, min_value=-(2.0**127), max_value=2.0**127))
def test_bf16_rounds_to_nearest_even(value):
    bits = int(floats.float32_to_bf16(np.array([value], dtype=np.float32))[0])
    around = np.array([bits - 1, bits, bits + 1], dtype=np.int64).astype(np.uint16)
    candidates = floats.bf16_to_float32(around)[np.isfinite(floats.bf16_to_float32(around))]
    distance = [abs(Fraction(float(c)) - Fraction(value)) for c in candidates]
    got = abs(Fraction(float(floats.bf16_to_float32(np.uint16([bits]))[0])) - Fraction(value))
    assert got == min(distance)
    if distance.count(got) > 1:
        assert bits % 2 == 0


@pytest.mark.parametrize("lower", [0x0000, 0x0001, 0x007F, 0x3F80, 0x3F81, 0x7F7E, 0xC001, 0xC002])
def test_bf16_midpoints_go_to_the_even_pattern(lower):
    middle = np.array([(lower << 16) + 0x8000], dtype=np.uint32).view(np.float32)
    assert floats.float32_to_bf16(middle) == lower + lower % 2


def test_bf16_keeps_infinity_and_nan():
    bits = floats.float32_to_bf16(np.array([np.inf, -np.inf, np.nan], dtype=np.float32))
    assert bits.tolist()[:2] == [0x7F80, 0xFF80]
    assert np.isnan(floats.bf16_to_float32(bits[2:]))
