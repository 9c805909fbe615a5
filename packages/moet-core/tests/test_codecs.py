import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet_core import layout
from moet_core.codecs import (
    Codec,
    Planes,
    check_bf16_range,
    codec_names,
    get_codec,
    register_codec,
    w2_codes,
)
from moet_core.errors import ConfigError, TensorError
from moet_core.samples import FORMATS, difficult_source, typical_source
from moet_core.sources import to_float64

SEEDS = st.integers(0, 2**32)


def test_names():
    assert codec_names() == ("w2", "fp4-mx", "fp4-nv")


def test_an_unknown_codec_is_refused_with_the_allowed_names():
    with pytest.raises(ConfigError, match="'w3' does not exist; choose one of: w2, fp4-mx"):
        get_codec("w3")


def test_a_taken_name_is_refused():
    with pytest.raises(ConfigError, match="'w2' is already registered"):
        register_codec(get_codec("w2"))


def test_a_registered_codec_is_found(monkeypatch):
    monkeypatch.setattr("moet_core.codecs._CODECS", {})
    w2 = get_codec_fields(name="mine")
    register_codec(w2)
    assert get_codec("mine") is w2
    assert codec_names() == ("mine",)


def get_codec_fields(name):
    return Codec(
        name=name,
        layout="flat",
        code_bits=8,
        scale_group=32,
        has_tensor_scale=False,
        encode=lambda source, *, zeros="auto", whole=None: None,
        decode=lambda planes: None,
    )


@pytest.mark.parametrize(
    ("name", "bits"), [("w2", 2.25), ("fp4-mx", 4.25), ("fp4-nv", 4.5 + 32 / (64 * 128))]
)
def test_bits_per_weight_is_what_planes_take(name, bits):
    codec = get_codec(name)
    planes = codec.encode(typical_source("fp32", 64, 128))
    stored = 8 * (planes.codes.size + planes.scales.size)
    stored += 32 if planes.tensor_scale is not None else 0
    assert codec.bits_per_weight(64, 128) == bits == stored / (64 * 128)
    assert codec.code_bytes(64, 128) == planes.codes.size
    assert codec.scale_bytes(64, 128) == planes.scales.size


@given(SEEDS)
def test_fp4_mx_is_exact_for_mxfp4(seed):
    source = difficult_source("mxfp4", 32, 96, seed=seed)
    decoded = get_codec("fp4-mx").decode(get_codec("fp4-mx").encode(source))
    assert_same_bits(decoded, to_float64(source))


@given(SEEDS)
def test_fp4_nv_is_exact_for_nvfp4(seed):
    source = difficult_source("nvfp4", 32, 96, seed=seed)
    decoded = get_codec("fp4-nv").decode(get_codec("fp4-nv").encode(source))
    assert_same_bits(decoded, to_float64(source))


def assert_same_bits(one, other):
    np.testing.assert_array_equal(one.view(np.int64), other.view(np.int64))


@given(st.sampled_from(FORMATS), SEEDS)
def test_w2_decodes_to_its_levels_times_its_scales(source_format, seed):
    source = difficult_source(source_format, 16, 160, seed=seed)
    codes, scales = w2_codes(source)
    decoded = get_codec("w2").decode(get_codec("w2").encode(source))
    levels = np.array([-4, -1, 1, 4])[codes]
    expected = levels * np.ldexp(1.0, scales.astype(int) - 127).repeat(32, axis=1)
    np.testing.assert_array_equal(decoded, expected)


def test_w2_error_of_normal_weights_is_as_small_as_four_levels_allow():
    source = typical_source("fp32", 64, 256)
    error = get_codec("w2").decode(get_codec("w2").encode(source)) - source.weight
    relative = np.sqrt((error**2).mean() / (source.weight.astype(float) ** 2).mean())
    assert 0.3 < relative < 0.6


def test_planes_say_what_they_are():
    planes = get_codec("w2").encode(typical_source("bf16", 16, 64))
    assert (planes.codec, planes.shape, planes.tensor_scale) == ("w2", (16, 64), None)
    assert get_codec("w2").layout == layout.W2_LAYOUT == "w2-frag16-v1"
    assert get_codec("fp4-mx").layout == get_codec("fp4-nv").layout == "fp4-frag16-v1"


def test_decoding_planes_of_another_shape_is_refused():
    planes = get_codec("w2").encode(typical_source("bf16", 16, 64))
    wrong = Planes("w2", (32, 64), planes.codes, planes.scales)
    with pytest.raises(TensorError, match=r"wanted 512 bytes for a matrix \[32, 64\]"):
        get_codec("w2").decode(wrong)


@pytest.mark.parametrize("name", ["fp4-mx", "fp4-nv", "w2"])
def test_every_codec_knows_the_zeros_modes(name):
    with pytest.raises(ConfigError, match="Zeros mode 'none' does not exist"):
        get_codec(name).encode(typical_source("bf16", 16, 64), zeros="none")


def test_bf16_range_allows_252_and_refuses_253():
    check_bf16_range(np.array([0, 252], dtype=np.uint8), "x")
    with pytest.raises(TensorError, match="got byte 253"):
        check_bf16_range(np.array([7, 253], dtype=np.uint8), "x")


def test_the_largest_allowed_scale_is_finite_in_bf16_and_the_next_is_not():
    largest_bf16 = float(np.ldexp(1 + 127 / 128, 127))
    assert 6 * 2.0 ** (252 - 127) <= largest_bf16 < 4 * 2.0 ** (253 - 127)
