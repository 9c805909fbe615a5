"""Tiles of decoded weights, scales included: operands of products with many vectors.

Every weight times its scale is exact in bfloat16, so the product needs one sum over all of K.
The columns of every 16 come in the order (pair, t, member of pair), which the matrix unit has and
activations must be stored in.
"""

import triton
import triton.language as tl

from moet_kernels.portable import ptx
from moet_kernels.portable.weights import (
    chunk_columns,
    members,
    scale_block_columns,
    scale_group,
    scale_value,
    scale_words,
)

__all__ = ["arranged", "decoded_chunk"]

_W2_SCALED: tl.constexpr = ptx.W2_SCALED
_W2_SCALED_CONSTRAINTS: tl.constexpr = ptx.W2_SCALED_CONSTRAINTS
_FP4_SCALED: tl.constexpr = ptx.FP4_SCALED
_FP4_SCALED_CONSTRAINTS: tl.constexpr = ptx.FP4_SCALED_CONSTRAINTS


@triton.jit
def arranged(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPREAD: tl.constexpr):
    """Reorder the columns of [ROWS, COLUMNS] in every 16 from natural to the operands' order.

    SPREAD says that pairs are of j and j + 2 (fp4), not of neighbours (w2).
    """
    parts = tl.reshape(values, [ROWS, COLUMNS // 16, 4, 2, 2])
    # [row, sixteen, pair, t, member]
    if SPREAD:  # noqa: SIM108 - Triton chooses between tuples only this way
        ordered = tl.permute(parts, (0, 1, 4, 2, 3))
    else:
        ordered = tl.permute(parts, (0, 1, 3, 2, 4))
    return tl.reshape(ordered, [ROWS, COLUMNS])


@triton.jit
def _pair_scales(words, WORDS: tl.constexpr, CODEC: tl.constexpr):
    """Return two bfloat16 of twice the scale in an int32, [..., WORDS], from words [..., 1]."""
    index = tl.arange(0, WORDS)
    byte = index // 2 if CODEC == "fp4-mx" else index
    value = scale_value(words >> byte * 8, 0, CODEC == "fp4-nv")
    bits = value.to(tl.int32, bitcast=True)
    return (bits & -65536) | (bits >> 16 & 0xFFFF)


@triton.jit
def decoded_chunk(
    codes,
    scales,
    blocks,
    chunk,
    levels,
    K: tl.constexpr,
    CODEC: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Return weights bfloat16 [g 8, tile 2, BLOCKS, columns of a chunk] of row blocks.

    Args:
        codes: Address uint8 of the code plane of a matrix with K columns.
        scales: Address uint8 of its scale plane.
        blocks: Row blocks int32 [BLOCKS], all of which exist.
        chunk: Which `chunk_columns(CODEC, K)` columns.
        levels: `ptx.W2_LEVELS`.
        K: Columns of the matrix.
        CODEC: "w2", "fp4-mx" or "fp4-nv".
        BLOCKS: Number of row blocks, a power of two.
    """
    CHUNK: tl.constexpr = chunk_columns(CODEC, K)
    CHUNKS: tl.constexpr = K // CHUNK
    PER_BLOCK: tl.constexpr = scale_block_columns(K) // CHUNK
    BYTES: tl.constexpr = CHUNK // scale_group(CODEC)
    WORDS: tl.constexpr = CHUNK // (32 if CODEC == "w2" else 16)
    lane = tl.arange(0, 32)
    word_at = lane[:, None, None] * WORDS + tl.arange(0, WORDS)
    code_at = codes.to(tl.pointer_type(tl.int32)) + word_at
    words = tl.load(code_at + ((blocks * CHUNKS + chunk) * (32 * WORDS))[None, :, None])
    block = blocks * (CHUNKS // PER_BLOCK) + chunk // PER_BLOCK
    scale_at = scales + chunk % PER_BLOCK * BYTES
    scale_at += (block[None, :] * 16 + (lane // 4)[:, None]) * (PER_BLOCK * BYTES)
    low = scale_words(scale_at, BYTES)[:, :, None]
    high = scale_words(scale_at + 8 * PER_BLOCK * BYTES, BYTES)[:, :, None]
    low, high = _pair_scales(low, WORDS, CODEC), _pair_scales(high, WORDS, CODEC)
    if CODEC == "w2":
        p = tl.inline_asm_elementwise(
            _W2_SCALED,
            _W2_SCALED_CONSTRAINTS,
            [words, levels, low, high],
            dtype=(
                tl.int32,
                tl.int32,
                tl.int32,
                tl.int32,
                tl.int32,
                tl.int32,
                tl.int32,
                tl.int32,
            ),
            is_pure=True,
            pack=1,
        )
        first = _joined(p[0], p[1], p[2], p[3])
        second = _joined(p[4], p[5], p[6], p[7])
        # [lane, block, word, member, pair, tile, half]
        parts = tl.reshape(tl.join(first, second), [8, 4, BLOCKS, WORDS, 2, 2, 2, 2])
        ordered = tl.permute(parts, (0, 6, 2, 3, 7, 5, 1, 4))
    else:
        p = tl.inline_asm_elementwise(
            _FP4_SCALED,
            _FP4_SCALED_CONSTRAINTS,
            [words, low, high],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        parts = tl.reshape(_joined(p[0], p[1], p[2], p[3]), [8, 4, BLOCKS, WORDS, 2, 2, 2])
        ordered = tl.permute(parts, (0, 6, 2, 3, 5, 1, 4))
    return tl.reshape(ordered, [8, 2, BLOCKS, CHUNK])


@triton.jit
def _joined(p0, p1, p2, p3):
    """Join the pairs of (tile, pair), int32 [...], as bfloat16 [..., member, pair, tile]."""
    tile0 = tl.join(members(p0), members(p1))
    tile1 = tl.join(members(p2), members(p3))
    return tl.join(tile0, tile1)
