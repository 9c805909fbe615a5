from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from moet_core import quantise
from moet_core import sources as golden
from moet_core.codecs import codec_names, get_codec
from moet_core.errors import ConfigError, TensorError
from moet_core.row import encode_expert, row_layout
from moet_core.samples import BLOCK_KINDS, FORMATS, difficult_source, typical_source
from moet_core.shards import shard_source
from moet_kernels import encode, sources
from moet_kernels.encode import encode_expert_into, encode_matrix, from_numpy

PAIRS = [
    (codec, source_format)
    for codec in codec_names()
    for source_format in FORMATS
    if (codec, source_format) != ("fp4-nv", "mxfp4")
]
SHAPES = st.sampled_from([(16, 32), (16, 96), (48, 128), (32, 160), (32, 512)])
KINDS = st.lists(st.sampled_from(BLOCK_KINDS), min_size=1, max_size=3)
SEEDS = st.integers(0, 2**32)
PIECES = st.sampled_from([1, 2**18])  # bytes at a time; 1 means 16 rows


def assert_twins(codec, source, pieces=2**18, **options):
    planes = get_codec(codec).encode(source, **options)
    if "whole" in options:
        options["whole"] = from_numpy(options["whole"])
    with mock.patch.object(sources, "_CHUNK_ON_CPU", pieces):
        twin = encode_matrix(codec, from_numpy(source), **options)
    np.testing.assert_array_equal(twin.codes.numpy(), planes.codes)
    np.testing.assert_array_equal(twin.scales.numpy(), planes.scales)
    assert twin.tensor_scale == planes.tensor_scale


def with_value(array, row, column, value):
    changed = array.copy()
    changed[row, column] = value
    return changed


@pytest.mark.parametrize(("codec", "source_format"), PAIRS)
@given(SHAPES, SEEDS, KINDS, st.sampled_from(quantise.ZERO_MODES), PIECES)
def test_twin_equals_golden(codec, source_format, shape, seed, kinds, zeros, pieces):
    source = difficult_source(source_format, *shape, seed=seed, kinds=kinds)
    assert_twins(codec, source, pieces, zeros=zeros)


@pytest.mark.parametrize(("codec", "source_format"), PAIRS)
def test_twin_equals_golden_on_typical_weights(codec, source_format):
    assert_twins(codec, typical_source(source_format, 272, 1024))


@given(SEEDS, st.sampled_from(["gate", "down"]), st.sampled_from(FORMATS), st.integers(0, 2))
def test_twin_equals_golden_on_shards(seed, which, source_format, rank):
    whole = difficult_source(source_format, 96, 192, seed=seed)
    if which == "down":
        whole = difficult_source(source_format, 192, 96, seed=seed)
    shard = shard_source(whole, which, rank, 3)
    assert_twins("w2", shard, whole=whole)
    twin_shard = encode.shard_source(from_numpy(whole), which, rank, 3)
    twin = encode_matrix("w2", twin_shard, whole=from_numpy(whole))
    np.testing.assert_array_equal(
        twin.codes.numpy(), get_codec("w2").encode(shard, whole=whole).codes
    )


@given(
    st.sampled_from(FORMATS), SHAPES, SEEDS, st.sampled_from(["zeros", "negative zeros", "mixed"])
)
def test_zeros_alternate_equals_golden(source_format, shape, seed, kind):
    source = difficult_source(source_format, *shape, seed=seed, kinds=[kind])
    assert encode.zeros_alternate(from_numpy(source)) == quantise.zeros_alternate(source)


@pytest.mark.parametrize("bits", range(0, 2**16, 2**12))
def test_every_bf16_equals_golden(bits):
    row = np.arange(bits, bits + 2**12, dtype=np.uint16)
    row[(row & 0x7F80) == 0x7F80] = 0
    source = golden.FloatSource("x", np.tile(row, (16, 1)).reshape(16 * 32, -1), bf16=True)
    assert_twins("w2", source)
    assert_twins("fp4-mx", source)


def test_exponents_agree_next_to_their_bound():
    bound = np.float32(quantise.ROUND_UP_MANTISSA).view(np.int32)
    near = (bound + np.arange(-8, 8, dtype=np.int32)).view(np.float32)
    weight = np.zeros((16, 64), np.float32)
    weight[:, 5], weight[:, 40] = near, np.ldexp(near, 20)
    assert len(np.unique(quantise.fp4_mx_nibbles(golden.FloatSource("x", weight))[1])) == 4
    assert_twins("fp4-mx", golden.FloatSource("x", weight))


def test_eight_bit_floats_may_have_their_own_dtypes():
    for source_format, part, dtype in (
        ("fp8", "weight", torch.float8_e4m3fn),
        ("nvfp4", "scale", torch.float8_e4m3fn),
        ("mxfp4", "scale", torch.float8_e8m0fnu),
    ):
        plain = from_numpy(typical_source(source_format, 32, 64))
        typed = structs.replace(plain, **{part: getattr(plain, part).view(dtype)})
        assert torch.equal(encode_matrix("w2", typed).codes, encode_matrix("w2", plain).codes)


def test_bf16_may_be_a_bfloat16_tensor():
    source = typical_source("bf16", 32, 64)
    typed = encode.FloatSource("x", torch.from_numpy(source.weight).view(torch.bfloat16))
    expected = get_codec("w2").encode(source)
    np.testing.assert_array_equal(encode_matrix("w2", typed).codes.numpy(), expected.codes)


def test_the_sign_of_a_zero_tensor_scale_is_stored():
    shapes = [(32, 32)] * 3
    negative = [structs.replace(typical_source("nvfp4", *s), scale_2=-0.0) for s in shapes]
    layout = row_layout("fp4-nv", 32, 32)
    row = torch.empty(layout.row_bytes, dtype=torch.uint8)
    encode_expert_into(row, layout, *map(from_numpy, negative))
    np.testing.assert_array_equal(row.numpy(), encode_expert("fp4-nv", *negative))
    assert row[layout.tensor_scales.slice].tolist() == [0, 0, 0, 0x80] * 3 + [0] * 4


def test_nvfp4_tensor_scale_may_be_a_tensor():
    source = typical_source("nvfp4", 32, 64)
    typed = structs.replace(from_numpy(source), scale_2=torch.tensor([source.scale_2]))
    assert encode_matrix("fp4-nv", typed).tensor_scale == source.scale_2


def test_sources_share_memory_with_numpy():
    source = typical_source("mxfp4", 16, 32)
    assert from_numpy(source).nibbles.data_ptr() == source.nibbles.ctypes.data


SPOILED = [
    ("bf16", {"weight": (3, 17, 0x7F80)}),
    ("fp16", {"weight": (3, 17, np.nan)}),
    ("fp32", {"weight": (30, 1, -np.inf)}),
    ("fp8", {"weight": (31, 63, 0xFF)}),
    ("fp8", {"scale": (0, 0, np.nan)}),
    ("mxfp4", {"scale": (17, 1, 0xFF)}),
    ("nvfp4", {"scale": (17, 3, 0x7F)}),
]


@pytest.mark.parametrize(("source_format", "spoil"), SPOILED)
def test_values_that_are_not_finite_are_refused_with_the_golden_words(source_format, spoil):
    source = typical_source(source_format, 32, 64)
    ((part, (row, column, value)),) = spoil.items()
    bad = with_value(getattr(source, part), row, column, value)
    assert_same_refusal("w2", structs.replace(source, **{part: bad}))


@pytest.mark.parametrize(
    ("source_format", "change"),
    [
        ("mxfp4", {"nibbles": None}),
        ("mxfp4", {"scale": None}),
        ("nvfp4", {"scale_2": None}),
        ("nvfp4", {"scale_2": float("nan")}),
        ("fp8", {"block": (0, 1)}),
        ("fp8", {"scale": np.ones((2, 2), np.float32)}),
        ("fp32", {"weight": np.zeros((15, 64), np.float32)}),
        ("fp32", {"weight": np.zeros((0, 64), np.float32)}),
        ("fp32", {"weight": np.zeros((16, 64), np.int32)}),
    ],
)
def test_malformed_sources_are_refused_with_the_golden_words(source_format, change):
    source = structs.replace(typical_source(source_format, 16, 64), **change)
    assert_same_refusal("fp4-mx", source)


def test_fp4_nv_of_mxfp4_is_refused_with_the_golden_words():
    assert_same_refusal("fp4-nv", typical_source("mxfp4", 16, 64))


def assert_same_refusal(codec, source):
    with pytest.raises(TensorError) as expected:
        get_codec(codec).encode(source)
    with pytest.raises(TensorError) as caught:
        encode_matrix(codec, from_numpy(source))
    assert str(caught.value) == str(expected.value)


def test_float64_has_no_twin():
    source = encode.FloatSource("x", torch.zeros(16, 32, dtype=torch.float64))
    with pytest.raises(TensorError, match="wanted a weight of type bfloat16, float16 or float32"):
        encode_matrix("w2", source)


def test_unknown_names_are_refused():
    source = from_numpy(typical_source("bf16", 16, 32))
    with pytest.raises(ConfigError, match="Codec 'w9' does not exist"):
        encode_matrix("w9", source)
    with pytest.raises(ConfigError, match="Zeros mode 'x' does not exist"):
        encode_matrix("fp4-mx", source, zeros="x")


def expert(source_format, hidden, intermediate, seed=0):
    shapes = [(intermediate, hidden)] * 2 + [(hidden, intermediate)]
    return [difficult_source(source_format, *s, seed=seed + i) for i, s in enumerate(shapes)]


@given(st.sampled_from(PAIRS), SEEDS, st.sampled_from([(0, 1), (0, 2), (1, 2)]))
def test_experts_are_written_into_rows_as_the_golden_row(pair, seed, ranks):
    (codec, source_format), (rank, size) = pair, ranks
    sources_ = expert(source_format, 64, 128, seed)
    layout = row_layout(codec, 64, 128 // size)
    pool = torch.full((3, layout.row_bytes), 0xEE, dtype=torch.uint8)
    encode_expert_into(pool[1], layout, *map(from_numpy, sources_), rank=rank, size=size)
    expected = encode_expert(codec, *sources_, rank=rank, size=size)
    np.testing.assert_array_equal(pool[1].numpy(), expected)
    assert (pool[[0, 2]] == 0xEE).all()


@pytest.mark.parametrize("rank", [0, 1])
def test_where_zeros_go_is_decided_before_sharding(rank):
    inner = np.zeros((64, 32), np.float32)
    inner[32:] *= -1.0  # each rank's zeros share a sign, those of the whole do not
    source, down = golden.FloatSource("x", inner), golden.FloatSource("y", inner.T.copy())
    layout = row_layout("w2", 32, 32)
    row = torch.empty(layout.row_bytes, dtype=torch.uint8)
    twins = from_numpy(source), from_numpy(source), from_numpy(down)
    encode_expert_into(row, layout, *twins, rank=rank, size=2)
    expected = encode_expert("w2", source, source, down, rank=rank, size=2, zeros="sign")
    np.testing.assert_array_equal(row.numpy(), expected)


def test_each_matrix_may_have_its_own_zeros_mode():
    sources_ = [from_numpy(difficult_source("fp32", 32, 32, kinds=["zeros"]))] * 3
    layout = row_layout("w2", 32, 32)
    row = torch.empty(layout.row_bytes, dtype=torch.uint8)
    encode_expert_into(row, layout, *sources_, zeros=("sign", "alternate", "sign"))
    gate, up = row[layout.codes13.slice].chunk(2)
    down = row[layout.codes2.slice]
    assert gate.unique().tolist() == [0b10101010]
    assert up.unique().tolist() == [0b01011010]
    assert down.unique().tolist() == [0b10101010]


def test_an_expert_of_another_shape_is_refused():
    sources_ = list(map(from_numpy, expert("bf16", 64, 32)))
    layout = row_layout("w2", 64, 64)
    row = torch.empty(layout.row_bytes, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"gate matrix must be w2 \[64, 64\], got w2 \[32, 64\]"):
        encode_expert_into(row, layout, *sources_)


def test_a_row_of_another_length_is_refused():
    sources_ = list(map(from_numpy, expert("bf16", 64, 64)))
    row = torch.empty(100, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"A w2 row must be uint8 \[4096\], got uint8 \[100\]"):
        encode_expert_into(row, row_layout("w2", 64, 64), *sources_)
