import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet_core.floats import E4M3_VALUES
from moet_kernels.sm120.activations import (
    dequantise,
    from_fragments,
    quantise,
    scale_bytes,
    steps_of,
    to_fragments,
)

SIZES = (32, 64, 96, 128, 384, 2048)


def normal(k, seed=0, size=3.0):
    return (size * np.random.default_rng(seed).standard_normal((4, k))).astype(np.float32)


@pytest.mark.parametrize("k", SIZES)
def test_fragments_read_back(k):
    codes = np.random.default_rng(k).integers(0, 256, (3, k), np.uint8)
    stored = to_fragments(codes)
    assert (from_fragments(stored) == codes).all()
    assert steps_of(k) == {32: 1, 64: 2, 96: 1, 128: 4, 384: 4, 2048: 4}[k]


def test_a_lane_finds_its_bytes_of_four_steps_together():
    codes = np.arange(256, dtype=np.uint8)[None]  # columns of two blocks
    lane = to_fragments(codes)[0, 128:].reshape(4, 4, 2, 4)[2]  # second block, lane t = 2
    first = 128 + 4 * 2 + np.arange(4)
    for step in range(4):
        for half in range(2):
            assert (lane[step, half] == first + 32 * step + 16 * half).all()


@pytest.mark.parametrize("block", [32, 64, 128])
def test_errors_are_half_a_step_at_most(block):
    x = normal(256)
    codes, scales = quantise(x, block)
    error = np.abs(dequantise(codes, scales) - x)
    unit = np.repeat(np.exp2(scales - 127.0), 32, axis=1)
    assert (error <= np.maximum(np.abs(x) * 2.0**-4, unit * 2.0**-10)).all()
    assert (scales.reshape(4, -1, block // 32) == scales[:, :: block // 32, None]).all()


@given(st.integers(0, 2**31 - 2**23 - 1))
def test_a_scale_is_the_smallest_that_holds_its_block(bits):
    largest = np.array([bits], np.uint32).view(np.float32)
    byte = int(scale_bytes(largest)[0])
    assert 1 <= byte <= 248
    assert float(largest[0]) <= 448 * 2.0 ** (byte - 127)
    assert byte == 1 or float(largest[0]) > 448 * 2.0 ** (byte - 128)


def test_powers_of_two_and_zeros_are_exact():
    x = np.exp2(np.random.default_rng(1).integers(-3, 4, (2, 64))).astype(np.float32)
    x[0, :32] = 0
    x[1] *= -1
    codes, scales = quantise(x)
    assert (dequantise(codes, scales) == x).all()
    assert scales[0, 0] == 1


def test_nothing_saturates():
    x = np.full((1, 32), 448.0, np.float32)
    x[0, 0] = np.nextafter(np.float32(448), np.float32(500))
    codes, scales = quantise(x)
    assert scales[0, 0] == 128
    assert (E4M3_VALUES[codes[0]] == 224).all()
