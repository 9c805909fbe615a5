import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moet_core import layout as fragments
from moet_core.codecs import codec_names, get_codec
from moet_core.errors import ConfigError, TensorError
from moet_core.row import build_row, decode_row, encode_expert, row_layout, split_row
from moet_core.samples import FORMATS, difficult_source, typical_source
from moet_core.sources import FloatSource

HIDDEN, INTERMEDIATE = 96, 64


def expert(source_format="bf16", hidden=HIDDEN, intermediate=INTERMEDIATE, make=typical_source):
    shapes = [(intermediate, hidden)] * 2 + [(hidden, intermediate)]
    return [make(source_format, *shape, seed=seed) for seed, shape in enumerate(shapes)]


def test_w2_sections():
    layout = row_layout("w2", 4096, 2048)
    mib = 2**20
    assert [layout.codes13.offset, layout.codes13.length] == [0, 4 * mib]
    assert [layout.scales13.offset, layout.scales13.length] == [4 * mib, mib // 2]
    assert [layout.codes2.offset, layout.codes2.length] == [4 * mib + mib // 2, 2 * mib]
    assert [layout.scales2.offset, layout.scales2.length] == [6 * mib + mib // 2, mib // 4]
    assert layout.tensor_scales.length == 0
    assert layout.payload_bytes == layout.row_bytes == 6 * mib + 3 * mib // 4
    assert layout.bits_per_weight == 2.25


def test_fp4_nv_ends_with_tensor_scales():
    layout = row_layout("fp4-nv", 32, 32)
    assert layout.tensor_scales.offset == layout.scales2.end == 3 * 32 * 32 * 9 // 16
    assert layout.payload_bytes == layout.tensor_scales.offset + 16
    assert layout.row_bytes == 4096


@given(st.sampled_from(codec_names()), st.integers(1, 20), st.integers(1, 20))
def test_sections_are_aligned_and_do_not_overlap(codec, h, i):
    layout = row_layout(codec, 32 * h, 32 * i)
    sections = [
        layout.codes13,
        layout.scales13,
        layout.codes2,
        layout.scales2,
        layout.tensor_scales,
    ]
    end = 0
    for section in sections:
        assert section.offset % 16 == 0
        assert section.offset >= end
        end = section.end
    assert end == layout.payload_bytes <= layout.row_bytes < end + 4096
    assert layout.row_bytes % 4096 == 0


@pytest.mark.parametrize(("hidden", "intermediate"), [(0, 32), (48, 32), (32, 16), (32, -32)])
def test_impossible_sizes_are_refused(hidden, intermediate):
    with pytest.raises(ConfigError, match="must be a positive multiple of 32, got"):
        row_layout("w2", hidden, intermediate)


def test_unknown_codec_is_refused():
    with pytest.raises(ConfigError, match="Codec 'w5' does not exist"):
        row_layout("w5", 32, 32)


@pytest.mark.parametrize("codec", codec_names())
def test_splitting_returns_what_was_built(codec):
    layout = row_layout(codec, HIDDEN, INTERMEDIATE)
    planes = [get_codec(codec).encode(source) for source in expert()]
    for built, split in zip(planes, split_row(layout, build_row(layout, *planes)), strict=True):
        assert (split.codec, split.shape) == (built.codec, built.shape)
        assert split.tensor_scale == built.tensor_scale
        np.testing.assert_array_equal(split.codes, built.codes)
        np.testing.assert_array_equal(split.scales, built.scales)


@pytest.mark.parametrize("codec", codec_names())
def test_decoding_a_row_stacks_gate_on_up(codec):
    layout = row_layout(codec, HIDDEN, INTERMEDIATE)
    encoded = [get_codec(codec).encode(source) for source in expert()]
    gate, up, down = [get_codec(codec).decode(planes) for planes in encoded]
    w13, w2 = decode_row(layout, build_row(layout, *encoded))
    np.testing.assert_array_equal(w13, np.concatenate([gate, up]))
    np.testing.assert_array_equal(w2, down)


def test_gate_then_up_is_the_plane_of_the_stack():
    rng = np.random.default_rng(0)
    stack = rng.integers(0, 4, (2 * INTERMEDIATE, HIDDEN)).astype(np.uint8)
    scales = rng.integers(0, 255, (2 * INTERMEDIATE, HIDDEN // 32)).astype(np.uint8)
    gate, up = np.split(stack, 2)
    joined = np.concatenate([fragments.pack_codes2(gate), fragments.pack_codes2(up)])
    np.testing.assert_array_equal(joined, fragments.pack_codes2(stack))
    joined = np.concatenate([fragments.pack_scales(part, 32) for part in np.split(scales, 2)])
    np.testing.assert_array_equal(joined, fragments.pack_scales(scales, 32))


def test_tensor_scales_are_three_little_endian_floats_and_a_zero():
    layout = row_layout("fp4-nv", HIDDEN, INTERMEDIATE)
    sources = expert("nvfp4")
    row = encode_expert("fp4-nv", *sources)
    stored = row[layout.tensor_scales.slice].tobytes()
    expected = np.array([*(source.scale_2 for source in sources), 0], dtype="<f4")
    assert stored == expected.tobytes()


def test_a_row_is_padded_with_zeros():
    layout = row_layout("fp4-nv", HIDDEN, INTERMEDIATE)
    row = encode_expert("fp4-nv", *expert())
    assert row.shape == (layout.row_bytes,)
    assert layout.row_bytes > layout.payload_bytes
    assert not row[layout.payload_bytes :].any()


@given(
    st.sampled_from(FORMATS),
    st.sampled_from(codec_names()),
    st.integers(0, 2**32),
)
def test_ranks_decode_to_slices_of_the_whole_expert(source_format, codec, first):
    assume((source_format, codec) != ("mxfp4", "fp4-nv"))
    sources = expert(
        source_format, 32, 128, lambda *shape, seed: difficult_source(*shape, seed=seed + first)
    )
    w13, w2 = decode_row(row_layout(codec, 32, 128), encode_expert(codec, *sources))
    gate, up = np.split(w13, 2)
    for rank in range(2):
        row = encode_expert(codec, *sources, rank=rank, size=2)
        part13, part2 = decode_row(row_layout(codec, 32, 64), row)
        expected13 = np.concatenate([np.split(gate, 2)[rank], np.split(up, 2)[rank]])
        np.testing.assert_array_equal(part13, expected13)
        np.testing.assert_array_equal(part2, np.split(w2, 2, axis=1)[rank])


def test_where_zeros_go_is_decided_before_sharding():
    inner = np.zeros((64, 32), np.float32)
    inner[32:] *= -1.0  # each rank's zeros share a sign, those of the whole do not
    source, down = FloatSource("x", inner), FloatSource("y", np.ascontiguousarray(inner.T))
    for rank in range(2):
        row = encode_expert("w2", source, source, down, rank=rank, size=2)
        by_sign = encode_expert("w2", source, source, down, rank=rank, size=2, zeros="sign")
        np.testing.assert_array_equal(row, by_sign)


def test_a_matrix_of_another_shape_or_codec_is_refused():
    layout = row_layout("w2", HIDDEN, INTERMEDIATE)
    w2 = [get_codec("w2").encode(source) for source in expert()]
    with pytest.raises(ConfigError, match=r"down matrix must be w2 \[96, 64\], got w2 \[64, 96\]"):
        build_row(layout, w2[0], w2[1], w2[0])
    fp4 = get_codec("fp4-mx").encode(expert()[1])
    with pytest.raises(ConfigError, match=r"up matrix must be w2 \[64, 96\], got fp4-mx"):
        build_row(layout, w2[0], fp4, w2[2])


def test_a_row_of_another_length_is_refused():
    layout = row_layout("w2", HIDDEN, INTERMEDIATE)
    with pytest.raises(ConfigError, match=r"A w2 row must be uint8 \[8192\], got uint8 \[4096\]"):
        split_row(layout, np.zeros(4096, dtype=np.uint8))


def test_an_expert_with_nan_is_refused_by_name():
    gate, up, down = expert("fp32")
    up.weight[1, 2] = np.nan
    with pytest.raises(TensorError, match=r"Tensor 'typical.fp32': .* NaN at row 1, column 2"):
        encode_expert("w2", gate, up, down)
