import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moet_core.codecs import codec_names
from moet_core.row import decode_row, encode_expert, row_layout, split_row
from moet_core.samples import difficult_source, typical_source
from moet_core.sources import Mxfp4Source
from moet_kernels.encode import decode_rows, tensor_scales

SIZES = [(32, 32), (96, 64), (64, 96), (128, 128)]


def rows_of(codec, hidden, intermediate, seed=0, make=difficult_source):
    shapes = [(intermediate, hidden)] * 2 + [(hidden, intermediate)]
    experts = [
        [make("bf16", *shape, seed=seed + 3 * e + i) for i, shape in enumerate(shapes)]
        for e in range(2)
    ]
    return np.stack([encode_expert(codec, *sources) for sources in experts])


def expected_matrices(layout, row):
    """Decode a row with the golden functions, tensor scales divided out where there are any."""
    if layout.codec != "fp4-nv":
        return decode_row(layout, row)
    ones = row.copy()
    ones[layout.tensor_scales.slice] = np.array([1, 1, 1, 0], dtype="<f4").view(np.uint8)
    return decode_row(layout, ones)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("codec", codec_names())
@given(st.sampled_from(SIZES), st.integers(0, 2**32))
def test_rows_decode_exactly(codec, dtype, sizes, seed):
    layout = row_layout(codec, *sizes)
    rows = rows_of(codec, *sizes, seed=seed)
    w13, w2 = decode_rows(torch.from_numpy(rows), layout, dtype)
    assert w13.dtype == w2.dtype == dtype
    for i, row in enumerate(rows):
        golden13, golden2 = expected_matrices(layout, row)
        np.testing.assert_array_equal(w13[i].double().numpy(), golden13)
        np.testing.assert_array_equal(w2[i].double().numpy(), golden2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("byte", [0, 1, 127, 252])
@pytest.mark.parametrize("codec", ["w2", "fp4-mx"])
def test_smallest_and_largest_scales_are_exact(codec, byte, dtype):
    nibbles = np.arange(16 * 2 * 32, dtype=np.int64).reshape(32, 32).astype(np.uint8)[:, :16]
    source = Mxfp4Source("x", nibbles.copy(), np.full((32, 1), byte, dtype=np.uint8))
    row = encode_expert(codec, source, source, source)
    layout = row_layout(codec, 32, 32)
    w13, w2 = decode_rows(torch.from_numpy(row)[None], layout, dtype)
    golden13, golden2 = decode_row(layout, row)
    np.testing.assert_array_equal(w13[0].double().numpy(), golden13)
    np.testing.assert_array_equal(w2[0].double().numpy(), golden2)


def test_tensor_scales_are_those_of_the_planes():
    layout = row_layout("fp4-nv", 64, 32)
    rows = rows_of("fp4-nv", 64, 32, make=typical_source)
    scales = tensor_scales(torch.from_numpy(rows), layout)
    expected = [[planes.tensor_scale for planes in split_row(layout, row)] for row in rows]
    assert scales.tolist() == expected


def test_codecs_without_tensor_scales_have_none():
    layout = row_layout("w2", 64, 32)
    assert tensor_scales(torch.zeros(1, layout.row_bytes, dtype=torch.uint8), layout) is None


def test_float16_is_refused():
    layout = row_layout("w2", 64, 32)
    rows = torch.zeros(1, layout.row_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"not to torch\.float16"):
        decode_rows(rows, layout, torch.float16)
