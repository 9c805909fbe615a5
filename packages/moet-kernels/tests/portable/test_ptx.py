"""The inline PTX, run exhaustively, against the codebooks and the layout."""

import numpy as np
import pytest

from moet_core.floats import E2M1_VALUES
from moet_core.quantise import W2_LEVELS
from moet_kernels.portable import ptx
from moet_kernels.portable.interpret import run_ptx


def as_float(pairs):
    """[..., 2] float32: the bfloat16 in the low and in the high half of words."""
    halves = np.stack([pairs & 0xFFFF, pairs >> 16], axis=-1)
    return (halves.astype(np.uint32) << 16).view(np.float32)


def random_words(count=4096):
    return np.random.default_rng(1).integers(0, 2**32, count, dtype=np.uint32)


def w2_levels(words):
    """What the pairs of w2 words must be, [half, tile, pair, word, member], halved."""
    register, j = np.meshgrid(np.arange(4), np.arange(4), indexing="ij")
    shift = 16 * (register >> 1) + 4 * j + 2 * (register & 1)  # docs/formats.md
    codes = words >> shift[..., None].astype(np.uint32) & 3
    levels = np.asarray(W2_LEVELS)[codes] / 2
    return levels.reshape(2, 2, 2, 2, len(words)).swapaxes(3, 4)


def fp4_values(words):
    """What the pairs of fp4 words must be, [tile, pair, word, member], halved."""
    tile, pair, member = np.meshgrid(*[np.arange(2)] * 3, indexing="ij")
    shift = 8 * (pair + 2 * member) + 4 * tile
    nibbles = words >> shift[..., None].astype(np.uint32) & 15
    return (np.asarray(E2M1_VALUES)[nibbles] / 2).swapaxes(2, 3)


def bfloat16_twice(values):
    bits = values.astype(np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return bits & 0xFFFF0000 | bits >> 16


def levels_like(words):
    return np.full_like(words, ptx.W2_LEVELS)


def test_every_w2_code_decodes_to_half_its_level():
    words = random_words()
    found = run_ptx(ptx.W2.value, [words, levels_like(words)], 8)
    np.testing.assert_array_equal(
        as_float(np.stack(found)).reshape(2, 2, 2, -1, 2), w2_levels(words)
    )


def test_every_nibble_decodes_to_half_its_value_with_its_sign():
    words = random_words()
    found = as_float(np.stack(run_ptx(ptx.FP4.value, [words], 4))).reshape(2, 2, -1, 2)
    wanted = fp4_values(words)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


@pytest.mark.parametrize("exponents", [(-126, -120), (-20, 20), (110, 125)])
def test_scaled_products_are_exact(exponents):
    words = random_words()
    generator = np.random.default_rng(2)
    scales = 2.0 ** generator.integers(*exponents, (2, len(words)))
    low, high = map(bfloat16_twice, scales)
    found = run_ptx(ptx.W2_SCALED.value, [words, levels_like(words), low, high], 8)
    wanted = w2_levels(words) * scales[None, :, None, :, None]
    np.testing.assert_array_equal(as_float(np.stack(found)).reshape(wanted.shape), wanted)
    found = run_ptx(ptx.FP4_SCALED.value, [words, low, high], 4)
    wanted = fp4_values(words) * scales[:, None, :, None]
    np.testing.assert_array_equal(as_float(np.stack(found)).reshape(wanted.shape), wanted)


def test_unknown_instructions_are_refused():
    with pytest.raises(ValueError, match=r"'mul\.lo\.u32' is not known"):
        run_ptx("{ mul.lo.u32 $0, $1, 3; }", [np.zeros(1, np.uint32)], 1)


def test_results_that_are_not_written_are_refused():
    with pytest.raises(ValueError, match=r"never writes '\$1'"):
        run_ptx("{ mov.b32 $0, $2; }", [np.zeros(1, np.uint32)], 2)
