from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet_core import quantise
from moet_core.errors import ConfigError, TensorError
from moet_core.floats import E4M3_VALUES, join_nibbles, split_nibbles
from moet_core.samples import BLOCK_KINDS, difficult_source, typical_source
from moet_core.sources import FloatSource, Fp8Source, Nvfp4Source, to_float64

MAGNITUDES = [Fraction(m) for m in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
SHAPES = st.sampled_from([(16, 32), (16, 64), (32, 96)])
KINDS = st.lists(st.sampled_from(BLOCK_KINDS), min_size=1, max_size=3)
SEEDS = st.integers(0, 2**32)


def requantised(*formats):
    """Draw a difficult source of one of the formats."""
    return st.builds(
        lambda source_format, shape, seed, kinds: difficult_source(
            source_format, *shape, seed=seed, kinds=kinds
        ),
        st.sampled_from(formats),
        SHAPES,
        SEEDS,
        KINDS,
    )


NOT_MXFP4 = requantised("bf16", "fp16", "fp32", "fp8", "nvfp4")


def floats(rows):
    """Put a few values at the front of a matrix [16, 32] of ones."""
    weight = np.ones((16, 32))
    weight[0, : len(rows)] = rows
    return FloatSource("x", weight)


def nearest_index(value, step):
    """Return the index of the magnitude nearest to |value| / step, the lower of two."""
    wanted = abs(Fraction(float(value))) / step
    return min(range(8), key=lambda index: (abs(MAGNITUDES[index] - wanted), index))


def is_rounded_log2(exponent, amax):
    """Say whether exponent - 1/2 <= log2(amax / 6) < exponent + 1/2, in exact arithmetic."""
    square = (Fraction(float(amax)) / 6) ** 2
    return Fraction(2) ** (2 * exponent - 1) <= square < Fraction(2) ** (2 * exponent + 1)


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_exponent_is_the_rounded_logarithm(amax):
    exponent = int(quantise.block_exponents(np.array([amax]))[0])
    if -127 < exponent < 127:
        assert is_rounded_log2(exponent, amax)
    else:
        limit = Fraction(6) * Fraction(2) ** exponent
        assert (Fraction(amax) < 2 * limit) if exponent < 0 else (Fraction(amax) > limit / 2)


@pytest.mark.parametrize("shift", [-60, 0, 60])
def test_exponent_is_right_on_both_sides_of_its_bound(shift):
    bound = quantise.ROUND_UP_MANTISSA
    below, at = np.nextafter(bound, 0), bound
    assert Fraction(below) ** 2 < Fraction(9, 32) < Fraction(at) ** 2
    exponents = quantise.block_exponents(np.ldexp([below, at], shift))
    assert exponents.tolist() == [shift - 4, shift - 3]


@pytest.mark.parametrize(("amax", "exponent"), [(0.0, -127), (1e-300, -127), (1e300, 127)])
def test_exponent_is_clamped(amax, exponent):
    assert quantise.block_exponents(np.array([amax])) == exponent


@given(NOT_MXFP4)
def test_fp4_mx_takes_the_nearest_magnitude_and_keeps_the_sign(source):
    values = to_float64(source)
    nibbles, scales = quantise.fp4_mx_nibbles(source)
    np.testing.assert_array_equal(nibbles >> 3, np.signbit(values))
    for row in range(0, len(values), 7):
        for column in range(values.shape[1]):
            step = Fraction(2) ** (int(scales[row, column // 32]) - 127)
            assert nibbles[row, column] & 7 == nearest_index(values[row, column], step)


@given(NOT_MXFP4)
def test_scale_is_the_rounded_logarithm_of_the_blocks_maximum(source):
    blocks = np.abs(to_float64(source)).reshape(source.shape[0], -1, 32).max(axis=2)
    scales = quantise.fp4_mx_nibbles(source)[1]
    for amax, byte in zip(blocks.flat, scales.flat, strict=True):
        assert byte in (0, 254) or is_rounded_log2(int(byte) - 127, amax)


@given(NOT_MXFP4)
def test_w2_codes_are_a_function_of_fp4_mx_nibbles(source):
    codes, scales = quantise.w2_codes(source, zeros="sign")
    nibbles, fp4_scales = quantise.fp4_mx_nibbles(source)
    np.testing.assert_array_equal(codes, quantise.CODE_OF_NIBBLE[nibbles])
    np.testing.assert_array_equal(scales, fp4_scales)


def test_small_magnitudes_become_one_and_big_ones_four():
    levels = quantise.W2_LEVELS[quantise.CODE_OF_NIBBLE]
    assert levels.tolist() == [1, 1, 1, 1, 1, 4, 4, 4, -1, -1, -1, -1, -1, -4, -4, -4]


@pytest.mark.parametrize(("value", "code"), [(2.5, 2), (2.5000001, 3), (-2.5, 1), (-2.5000001, 0)])
def test_the_midpoint_of_the_classes_is_small(value, code):
    assert quantise.w2_codes(floats([6.0, value]))[0][0, 1] == code


@given(requantised("mxfp4"), st.sampled_from(quantise.ZERO_MODES))
def test_mxfp4_is_looked_up_whatever_the_zeros_mode(source, zeros):
    codes, scales = quantise.w2_codes(source, zeros=zeros)
    nibbles = split_nibbles(source.nibbles)
    np.testing.assert_array_equal(codes, quantise.CODE_OF_NIBBLE[nibbles])
    np.testing.assert_array_equal(scales, source.scale)
    np.testing.assert_array_equal(quantise.fp4_mx_nibbles(source)[0], nibbles)


def test_zeros_follow_their_sign_bit():
    source = floats([0.0, 0.0, -0.0, -0.0])
    assert quantise.w2_codes(source, zeros="sign")[0][0, :4].tolist() == [2, 2, 1, 1]


def test_alternating_zeros_are_negative_in_odd_columns():
    source = floats([0.0, 0.0, -0.0, -0.0])
    assert quantise.w2_codes(source, zeros="alternate")[0][0, :4].tolist() == [2, 1, 2, 1]


def test_alternating_leaves_small_values_alone():
    source = floats([1e-30, 1e-30])
    assert quantise.w2_codes(source, zeros="alternate")[0][0, :2].tolist() == [2, 2]


@pytest.mark.parametrize(("zeros", "negative"), [(0, 0), (20, 2), (20, 18), (100, 6), (100, 94)])
def test_two_signed_or_absent_zeros_do_not_alternate(zeros, negative):
    assert not quantise.majority_alternates(zeros, negative)


@pytest.mark.parametrize(("zeros", "negative"), [(1, 0), (20, 1), (20, 19), (100, 5), (100, 95)])
def test_zeros_with_95_percent_of_a_sign_alternate(zeros, negative):
    assert quantise.majority_alternates(zeros, negative)


def test_auto_decides_on_the_whole_tensor():
    shard, rest = floats([0.0]), floats([-0.0])
    whole = FloatSource("x", np.concatenate([shard.weight, rest.weight]))
    assert quantise.zeros_alternate(shard)
    assert not quantise.zeros_alternate(whole)
    odd = floats([1.0, 0.0])
    assert quantise.w2_codes(odd)[0][0, 1] == 1
    assert quantise.w2_codes(odd, whole=whole)[0][0, 1] == 2


def test_zeros_of_a_zero_scale_count_by_the_sign_of_their_product():
    weight = np.full((16, 32), 0xB8, dtype=np.uint8)  # -1.0
    source = Fp8Source("x", weight, np.array([[-0.0]], dtype=np.float32), (16, 32))
    codes, scales = quantise.w2_codes(source, zeros="sign")
    assert (codes == 2).all()
    assert (scales == 0).all()
    assert quantise.zeros_alternate(source)


def test_mxfp4_never_alternates():
    source = difficult_source("mxfp4", 16, 32, kinds=["zeros"])
    assert not quantise.zeros_alternate(source)


def test_unknown_zeros_mode_is_refused():
    with pytest.raises(ConfigError, match=r"'odd' does not exist; choose one of: auto, sign, alt"):
        quantise.w2_codes(floats([]), zeros="odd")


@given(requantised("nvfp4"))
def test_fp4_nv_copies_nvfp4(source):
    nibbles, scales, tensor_scale = quantise.fp4_nv_nibbles(source)
    np.testing.assert_array_equal(join_nibbles(nibbles), source.nibbles)
    np.testing.assert_array_equal(scales, source.scale)
    assert tensor_scale == source.scale_2


@given(requantised("bf16", "fp16", "fp32", "fp8"))
def test_fp4_nv_takes_the_nearest_magnitude_under_its_scales(source):
    values = to_float64(source)
    nibbles, scales, tensor_scale = quantise.fp4_nv_nibbles(source)
    np.testing.assert_array_equal(nibbles >> 3, np.signbit(values))
    for row in range(0, len(values), 7):
        for column in range(values.shape[1]):
            step = Fraction(float(E4M3_VALUES[scales[row, column // 16]])) * Fraction(tensor_scale)
            expected = nearest_index(values[row, column], step) if step else 0
            assert nibbles[row, column] & 7 == expected


@given(requantised("bf16", "fp32", "fp8"))
def test_fp4_nv_scales_are_the_nearest_e4m3(source):
    blocks = np.abs(to_float64(source)).reshape(source.shape[0], -1, 16).max(axis=2)
    _, scales, tensor_scale = quantise.fp4_nv_nibbles(source)
    finite = E4M3_VALUES[:0x7F]
    for amax, byte in zip(blocks.flat, scales.flat, strict=True):
        wanted = amax / 6 / tensor_scale
        distance = np.abs(finite - wanted)
        assert distance[byte] == distance.min()


def test_fp4_nv_tensor_scale_maps_the_maximum_to_the_top():
    weight = np.full((16, 32), 6 * 448 / 4, dtype=np.float32)
    nibbles, scales, tensor_scale = quantise.fp4_nv_nibbles(FloatSource("x", weight))
    assert tensor_scale == 0.25
    assert (scales == 0x7E).all()
    assert (nibbles == 7).all()


def test_fp4_nv_of_zeros_has_tensor_scale_one():
    zeros = FloatSource("x", np.zeros((16, 32), np.float32))
    nibbles, scales, tensor_scale = quantise.fp4_nv_nibbles(zeros)
    assert tensor_scale == 1.0
    assert not nibbles.any()
    assert not scales.any()


def test_fp4_nv_tensor_scale_never_underflows_to_zero():
    tiny = FloatSource("x", np.full((16, 32), 2.0**-149, np.float32))
    assert quantise.fp4_nv_nibbles(tiny)[2] == 2.0**-149


def test_fp4_nv_takes_the_tensor_scale_of_the_whole():
    shard = typical_source("fp32", 16, 32)
    whole = FloatSource("x", np.concatenate([shard.weight, 8 * shard.weight]))
    assert quantise.fp4_nv_nibbles(shard, whole=whole)[2] == quantise.fp4_nv_tensor_scale(whole)
    assert quantise.fp4_nv_nibbles(shard)[2] == quantise.fp4_nv_tensor_scale(whole) / 8


def test_fp4_nv_refuses_values_beyond_float32():
    with pytest.raises(TensorError, match="a tensor scale that fits float32"):
        quantise.fp4_nv_nibbles(floats([1e300]))


def test_fp4_nv_refuses_mxfp4():
    with pytest.raises(TensorError, match="not defined for MXFP4; use fp4-mx"):
        quantise.fp4_nv_nibbles(typical_source("mxfp4", 16, 32))


@pytest.mark.parametrize(
    "function", [quantise.w2_codes, quantise.fp4_mx_nibbles, quantise.fp4_nv_nibbles]
)
def test_every_encoder_validates(function):
    with pytest.raises(TensorError, match="NaN at row 0, column 1"):
        function(floats([1.0, np.nan]))


def test_nvfp4_scale_2_scales_the_grid():
    source = typical_source("nvfp4", 16, 32)
    doubled = Nvfp4Source("x", source.nibbles, source.scale, 2 * source.scale_2)
    codes, scales = quantise.w2_codes(source)
    twice_codes, twice_scales = quantise.w2_codes(doubled)
    np.testing.assert_array_equal(codes, twice_codes)
    np.testing.assert_array_equal(scales + 1, twice_scales)
