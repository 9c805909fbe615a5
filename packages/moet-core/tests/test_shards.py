import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet_core import quantise
from moet_core.errors import ConfigError, TensorError
from moet_core.samples import FORMATS, difficult_source, typical_source
from moet_core.shards import shard_source
from moet_core.sources import Fp8Source, to_float64, validate

CANONICAL = {
    "w2": lambda source, whole: quantise.w2_codes(source, whole=whole),
    "fp4-mx": lambda source, whole: quantise.fp4_mx_nibbles(source),
    "fp4-nv": lambda source, whole: quantise.fp4_nv_nibbles(source, whole=whole),
}


def part_of(array, axis, rank, size):
    return np.split(array, size, axis=axis)[rank]


@given(
    st.sampled_from(FORMATS),
    st.sampled_from(["gate", "up", "down"]),
    st.sampled_from([(0, 2), (1, 2), (0, 3), (2, 3)]),
    st.integers(0, 2**32),
)
def test_encoding_a_shard_is_a_slice_of_encoding_the_whole(source_format, which, ranks, seed):
    rank, size = ranks
    axis = 1 if which == "down" else 0
    whole = difficult_source(source_format, 192, 192, seed=seed)
    shard = shard_source(whole, which, rank, size)
    validate(shard)
    for codec, encode in CANONICAL.items():
        if (codec, source_format) == ("fp4-nv", "mxfp4"):
            continue
        for got, full in zip(encode(shard, whole), encode(whole, whole), strict=True):
            expected = full if isinstance(full, float) else part_of(full, axis, rank, size)
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("block", [(128, 128), (96, 32), (192, 192), (1, 1), (40, 72)])
@pytest.mark.parametrize("which", ["gate", "down"])
def test_fp8_shards_are_exact_inside_blocks(block, which):
    rows, columns = -(-192 // block[0]), -(-192 // block[1])
    scale = np.arange(1, rows * columns + 1, dtype=np.float32).reshape(rows, columns)
    whole = Fp8Source("x", np.full((192, 192), 0x38, dtype=np.uint8), scale, block)
    axis = 1 if which == "down" else 0
    for rank in range(3):
        shard = shard_source(whole, which, rank, 3)
        expected = part_of(to_float64(whole), axis, rank, 3)
        np.testing.assert_array_equal(to_float64(shard), expected)


def test_one_rank_holds_everything():
    source = typical_source("nvfp4", 32, 64)
    shard = shard_source(source, "down", 0, 1)
    np.testing.assert_array_equal(shard.nibbles, source.nibbles)
    np.testing.assert_array_equal(shard.scale, source.scale)


def test_shards_are_views():
    source = typical_source("bf16", 64, 64)
    assert np.shares_memory(shard_source(source, "gate", 1, 2).weight, source.weight)


@pytest.mark.parametrize(
    ("which", "what"), [("up", "rows divisible by 32 x 3"), ("down", "columns divisible by 32 x 3")]
)
def test_an_indivisible_size_is_refused(which, what):
    with pytest.raises(TensorError, match=f"wanted {what} ranks, got 128"):
        shard_source(typical_source("fp8", 128, 128), which, 0, 3)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_does_not_exist_is_refused(rank, size):
    with pytest.raises(ConfigError, match=f"rank {rank} does not exist among {size}"):
        shard_source(typical_source("bf16", 32, 32), "gate", rank, size)


def test_a_malformed_source_is_refused_before_slicing():
    source = typical_source("mxfp4", 32, 64)
    bad = type(source)("x", source.nibbles, source.scale[:, :1])
    with pytest.raises(TensorError, match="wanted a scale of shape"):
        shard_source(bad, "gate", 0, 1)
