import numpy as np
import pytest
import torch

from moet_core import layout
from moet_core.floats import join_nibbles
from moet_kernels import fragments

SHAPES = [(16, 32), (16, 64), (32, 96), (16, 128), (48, 160), (32, 256), (64, 384)]


def matrix_of(n, columns, stop):
    return np.random.default_rng(0).integers(0, stop, (n, columns)).astype(np.uint8)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_codes_are_stored_where_the_layout_says(n, k):
    codes = matrix_of(n, k, 4)
    out = torch.full((n * k // 4,), 99, dtype=torch.uint8)
    fragments.pack_codes2(torch.from_numpy(join_nibbles(codes)), out)
    np.testing.assert_array_equal(out.numpy(), layout.pack_codes2(codes))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_nibbles_are_stored_where_the_layout_says(n, k):
    nibbles = matrix_of(n, k, 16)
    out = torch.full((n * k // 2,), 99, dtype=torch.uint8)
    fragments.pack_nibbles(torch.from_numpy(join_nibbles(nibbles)), out)
    np.testing.assert_array_equal(out.numpy(), layout.pack_nibbles(nibbles))


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_scales_are_stored_where_the_layout_says(n, k, group):
    scales = matrix_of(n, k // group, 256)
    out = torch.full((n * k // group,), 99, dtype=torch.uint8)
    fragments.pack_scales(torch.from_numpy(scales), group, out)
    np.testing.assert_array_equal(out.numpy(), layout.pack_scales(scales, group))


def test_input_may_be_a_misaligned_view():
    nibbles = matrix_of(16, 64, 16)
    storage = torch.zeros(16 * 32 + 3, dtype=torch.uint8)
    storage[3:] = torch.from_numpy(join_nibbles(nibbles)).flatten()
    out = torch.empty(16 * 32, dtype=torch.uint8)
    fragments.pack_nibbles(storage[3:].view(16, 32), out)
    np.testing.assert_array_equal(out.numpy(), layout.pack_nibbles(nibbles))
