"""Which tiles prefill is cut into."""

import pytest

from moet_kernels.bench_sweep import TILE_SHAPES
from moet_kernels.portable.many import tile_shape

ARCHITECTURES = (80, 86, 87, 89, 90, 100, 103, 110, 120, 121)


def wrong_on_hopper(shape):
    """Whether fp4-mx was seen to get wrong sums from such down tiles."""
    return shape.down_blocks >= 8 and shape.stages >= 3


@pytest.mark.parametrize("number", ARCHITECTURES)
@pytest.mark.parametrize("pairs", [17, 128, 64 * 256, 64 * 256 + 1, 8 * 8192, 2**20])
def test_no_shape_in_use_has_many_blocks_in_three_stages(number, pairs):
    shape = tile_shape(number, pairs, experts=256)
    assert not wrong_on_hopper(shape), shape


def test_no_shape_that_is_measured_has_them_either():
    assert [shape for shape in TILE_SHAPES if wrong_on_hopper(shape)] == []


def test_groups_grow_with_pairs_where_tiles_have_room():
    assert tile_shape(90, 8 * 8192, experts=256).group == 128
    assert tile_shape(90, 64 * 256, experts=256).group == 64
    assert tile_shape(86, 8 * 8192, experts=256).group == 64
    assert tile_shape(120, 8 * 8192, experts=256).group == 64
