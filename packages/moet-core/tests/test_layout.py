from math import gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet_core import layout
from moet_core.errors import TensorError

SHAPES = [(16, 32), (16, 64), (16, 96), (16, 128), (48, 160), (32, 256)]


def matrix_of(n, columns, stop, seed=0):
    return np.random.default_rng(seed).integers(0, stop, (n, columns)).astype(np.uint8)


def code_plane_by_bits(codes):
    """The definition of the code plane, one bit field at a time."""
    n, k = codes.shape
    block = gcd(k, 128)
    words = np.zeros(n * k // 16, dtype=np.uint32)
    for row in range(n):
        for column in range(k):
            nb, tile, g = row // 16, row % 16 // 8, row % 8
            kb, k32 = column // block, column % block // 32
            half, t, j = column % 32 // 16, column % 16 // 4, column % 4
            lane, register = 4 * g + t, 2 * half + tile
            word = ((nb * (k // block) + kb) * 32 + lane) * (block // 32) + k32
            shift = 16 * (register >> 1) + 4 * j + 2 * (register & 1)
            words[word] |= np.uint32(codes[row, column]) << np.uint32(shift)
    return words.astype("<u4").view(np.uint8)


def nibble_plane_by_bits(nibbles):
    n, k = nibbles.shape
    block = gcd(k, 64)
    words = np.zeros(n * k // 8, dtype=np.uint32)
    for row in range(n):
        for column in range(k):
            nb, tile, g = row // 16, row % 16 // 8, row % 8
            kb, k32 = column // block, column % block // 32
            half, t, j = column % 32 // 16, column % 16 // 4, column % 4
            lane = 4 * g + t
            word = (((nb * (k // block) + kb) * 32 + lane) * (block // 32) + k32) * 2 + half
            words[word] |= np.uint32(nibbles[row, column]) << np.uint32(8 * j + 4 * tile)
    return words.astype("<u4").view(np.uint8)


def scale_plane_by_bytes(scales, group):
    n, groups = scales.shape
    k = groups * group
    block = gcd(k, 128)
    plane = np.zeros(n * groups, dtype=np.uint8)
    for row in range(n):
        for column in range(groups):
            kb, within = column * group // block, column % (block // group)
            at = ((row // 16 * (k // block) + kb) * 16 + row % 16) * (block // group) + within
            plane[at] = scales[row, column]
    return plane


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_code_plane_is_as_defined(n, k):
    codes = matrix_of(n, k, 4)
    np.testing.assert_array_equal(layout.pack_codes2(codes), code_plane_by_bits(codes))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_nibble_plane_is_as_defined(n, k):
    nibbles = matrix_of(n, k, 16)
    np.testing.assert_array_equal(layout.pack_nibbles(nibbles), nibble_plane_by_bits(nibbles))


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_scale_plane_is_as_defined(n, k, group):
    scales = matrix_of(n, k // group, 256)
    plane = scale_plane_by_bytes(scales, group)
    np.testing.assert_array_equal(layout.pack_scales(scales, group), plane)


@pytest.mark.parametrize(
    ("row", "column", "byte", "value"),
    [
        (0, 0, 0, 0b11),  # lane 0, half 0, j 0, tile 0
        (8, 0, 0, 0b1100),  # the other tile: the next two bits
        (0, 1, 0, 0b110000),  # the next j: the next nibble
        (0, 2, 1, 0b11),
        (0, 16, 2, 0b11),  # the other half: the high 16 bits of the word
        (0, 4, 4, 0b11),  # t 1: the next lane, one word on
        (1, 0, 16, 0b11),  # g 1: four lanes on
        (15, 31, 127, 0b11000000),  # the last field of the last lane
    ],
)
def test_codes_of_16x32_by_hand(row, column, byte, value):
    codes = np.zeros((16, 32), dtype=np.uint8)
    codes[row, column] = 3
    plane = np.zeros(128, dtype=np.uint8)
    plane[byte] = value
    np.testing.assert_array_equal(layout.pack_codes2(codes), plane)


@pytest.mark.parametrize(
    ("k", "row", "column", "byte"),
    [
        (64, 0, 32, 4),  # second k32 of a block of two: the lane's second word
        (64, 0, 4, 8),  # the next lane comes two words on
        (128, 0, 96, 12),  # fourth word of a lane that reads 16 bytes
        (128, 1, 0, 64),  # four lanes of 16 bytes on
        (128, 15, 124, 510),  # the high half of lane 31's last word
    ],
)
def test_lanes_read_16_bytes_of_codes_where_128_divides_k(k, row, column, byte):
    codes = np.zeros((16, k), dtype=np.uint8)
    codes[row, column] = 3
    (found,) = np.flatnonzero(layout.pack_codes2(codes))
    assert found == byte


@pytest.mark.parametrize(
    ("k", "row", "column", "byte", "value"),
    [
        (32, 0, 0, 0, 0x0F),
        (32, 8, 0, 0, 0xF0),  # tile 1 shares the byte
        (32, 0, 3, 3, 0x0F),
        (32, 0, 16, 4, 0x0F),  # half 1: the next word
        (32, 0, 4, 8, 0x0F),  # the next lane
        (64, 0, 32, 8, 0x0F),  # second k32
        (64, 15, 63, 511, 0xF0),
        (128, 0, 64, 512, 0x0F),  # the second block of 64 columns
    ],
)
def test_nibbles_by_hand(k, row, column, byte, value):
    nibbles = np.zeros((16, k), dtype=np.uint8)
    nibbles[row, column] = 15
    plane = np.zeros(8 * k, dtype=np.uint8)
    plane[byte] = value
    np.testing.assert_array_equal(layout.pack_nibbles(nibbles), plane)


def test_a_lane_reads_four_scales_of_a_row_as_one_word():
    scales = np.arange(64, dtype=np.uint8).reshape(16, 4)
    np.testing.assert_array_equal(layout.pack_scales(scales, 32), np.arange(64))


def test_scale_blocks_of_128_columns_follow_each_other():
    scales = np.repeat(np.arange(8, dtype=np.uint8)[None], 16, axis=0)
    plane = layout.pack_scales(scales, 32)
    assert plane.tolist() == [0, 1, 2, 3] * 16 + [4, 5, 6, 7] * 16


def test_masked_code_words_are_permute_selectors():
    codes = matrix_of(16, 32, 4)
    words = layout.pack_codes2(codes).view("<u4")
    lane = 4 * 5 + 2
    for register, selectors in enumerate(
        [
            words[lane] & 0x3333,
            words[lane] >> 2 & 0x3333,
            words[lane] >> 16 & 0x3333,
            words[lane] >> 18 & 0x3333,
        ]
    ):
        half, tile = divmod(register, 2)
        fields = [int(selectors) >> 4 * j & 15 for j in range(4)]
        assert fields == codes[8 * tile + 5, 16 * half + 8 : 16 * half + 12].tolist()


def test_masked_nibble_words_are_e2m1_operands():
    nibbles = matrix_of(16, 32, 16)
    words = layout.pack_nibbles(nibbles).view("<u4").reshape(32, 2)
    lane = 4 * 3 + 1
    for half in range(2):
        word = int(words[lane, half])
        for tile, operand in enumerate([word << 2 & 0x3C3C3C3C, word >> 2 & 0x3C3C3C3C]):
            fields = [operand >> 8 * j + 2 & 15 for j in range(4)]
            assert fields == nibbles[8 * tile + 3, 16 * half + 4 : 16 * half + 8].tolist()


@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**32))
def test_unpacking_undoes_packing(blocks, k32, seed):
    n, k = 16 * blocks, 32 * k32
    codes, nibbles = matrix_of(n, k, 4, seed), matrix_of(n, k, 16, seed)
    scales = matrix_of(n, k // 16, 256, seed)
    np.testing.assert_array_equal(layout.unpack_codes2(layout.pack_codes2(codes), n, k), codes)
    np.testing.assert_array_equal(
        layout.unpack_nibbles(layout.pack_nibbles(nibbles), n, k), nibbles
    )
    np.testing.assert_array_equal(
        layout.unpack_scales(layout.pack_scales(scales, 16), n, k, 16), scales
    )


@pytest.mark.parametrize(("n", "k"), [(8, 32), (16, 16), (17, 32), (16, 48), (0, 32), (16, 0)])
def test_shapes_without_whole_tiles_are_refused(n, k):
    with pytest.raises(TensorError, match=rf"got \[{n}, {k}\]"):
        layout.pack_codes2(np.zeros((n, k), dtype=np.uint8))


def test_a_plane_of_another_length_is_refused():
    with pytest.raises(TensorError, match="wanted 128 bytes"):
        layout.unpack_codes2(np.zeros(127, dtype=np.uint8), 16, 32)
