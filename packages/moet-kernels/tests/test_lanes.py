import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moet_core.quantise import CODE_OF_NIBBLE
from moet_kernels.lanes import (
    alternate_zeros,
    as_words,
    count_zeros,
    lanes_of,
    to_codes,
    to_nibble_bytes,
    to_nibbles,
)

WIDTHS = (4, 8, 16, 32)
DTYPES = {8: np.uint8, 16: np.uint16, 32: np.uint32}


def pack(values, width):
    """Put lane values [rows, columns] into int64 words, lowest column first."""
    if width == 4:
        values = np.array(values, dtype=np.uint8)
        stored = values[:, 0::2] | values[:, 1::2] << 4
    else:
        stored = np.array(values, dtype=DTYPES[width])
    return torch.from_numpy(np.ascontiguousarray(stored).view(np.int64))


def unpack(words, width):
    stored = words.numpy()
    if width == 4:
        packed = stored.view(np.uint8)
        return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    return stored.view(DTYPES[width])


@st.composite
def lanes_and_threshold(draw):
    width = draw(st.sampled_from(WIDTHS))
    top = 2 ** (width - 1)
    threshold = draw(st.integers(1, top))
    near = st.integers(max(threshold - 1, 0), min(threshold, top - 1))
    magnitude = st.one_of(st.just(0), near, st.integers(0, top - 1))
    row = st.lists(st.tuples(magnitude, st.booleans()), min_size=16, max_size=16)
    values = [m + top * negative for m, negative in draw(row)]
    return width, threshold, values


@given(lanes_and_threshold())
def test_codes_compare_magnitudes_and_keep_signs(case):
    width, threshold, values = case
    lanes = lanes_of(width)
    bias = 2 ** (width - 1) - threshold
    codes = unpack(to_codes(pack([values], width), bias * lanes.ones, lanes), width)
    top = 2 ** (width - 1)
    expected = []
    for value in values:
        big, negative = value % top >= threshold, value >= top
        expected.append((0 if big else 1) if negative else (3 if big else 2))
    assert codes[0].tolist() == expected


@given(lanes_and_threshold(), st.integers(1, 7))
def test_nibbles_count_thresholds_reached(case, more):
    width, threshold, values = case
    lanes = lanes_of(width)
    top = 2 ** (width - 1)
    thresholds = sorted({min(threshold * i, top) for i in range(1, more + 1)})
    biases = [torch.tensor((top - t) * lanes.ones) for t in thresholds]
    nibbles = unpack(to_nibbles(pack([values], width), biases, lanes), width)
    expected = [sum(v % top >= t for t in thresholds) + 8 * (v >= top) for v in values]
    assert nibbles[0].tolist() == expected


@given(lanes_and_threshold())
def test_alternating_changes_zeros_only(case):
    width, _, values = case
    top = 2 ** (width - 1)
    words = alternate_zeros(pack([values], width), lanes_of(width))
    expected = [v if v % top else top * (column % 2) for column, v in enumerate(values)]
    assert unpack(words, width)[0].tolist() == expected


@given(lanes_and_threshold())
def test_zeros_are_counted_by_sign(case):
    width, _, values = case
    top = 2 ** (width - 1)
    counts = count_zeros(pack([values], width), lanes_of(width))
    assert counts == (values.count(0) + values.count(top), values.count(top))


@pytest.mark.parametrize("width", WIDTHS)
def test_nibble_bytes_hold_the_even_lane_low(width):
    values = [list(range(16)), list(range(15, -1, -1))]
    joined = to_nibble_bytes(pack(values, width), lanes_of(width))
    expected = [[values[r][2 * c] + 16 * values[r][2 * c + 1] for c in range(8)] for r in range(2)]
    assert joined.view(2, -1).tolist() == expected


def test_e2m1_nibbles_become_codes_at_magnitude_5():
    nibbles = np.arange(16, dtype=np.uint8)[None]
    lanes = lanes_of(4)
    codes = unpack(to_codes(pack(nibbles, 4), 3 * lanes.ones, lanes), 4)
    np.testing.assert_array_equal(codes[0], CODE_OF_NIBBLE)


def test_words_of_a_misaligned_view_are_copied():
    storage = torch.arange(65, dtype=torch.uint8)
    view = storage[1:].view(4, 16)
    words = as_words(view)
    assert words.view(torch.uint8).tolist() == view.tolist()
    assert words.data_ptr() != view.data_ptr()


def test_words_of_an_aligned_view_are_not_copied():
    matrix = torch.zeros(4, 16, dtype=torch.uint8)
    assert as_words(matrix).data_ptr() == matrix.data_ptr()
