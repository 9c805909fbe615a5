"""Rows of an encoded matrix times up to 8 vectors: weights are read once, as fast as memory can.

Every warp takes its own part of the columns, so that it needs nobody else's activations and there
is no barrier before the end. The order of every sum follows from K and the number of warps alone:
the result of one vector does not depend on the others or on how many there are.
"""

import triton
import triton.language as tl

from moet_kernels.portable.weights import (
    chunk_columns,
    fp4_pairs,
    halves,
    operand,
    scale_block_columns,
    scale_group,
    scale_value,
    scale_words,
    step_words,
    w2_pairs,
)

__all__ = ["stream_rows"]


@triton.jit
def _accumulate(total, part, low, high, BLOCKS: tl.constexpr, WARPS: tl.constexpr):
    """Add part [WARPS, rows, 8] times the scales of tiles low and high, [32, WARPS, BLOCKS]."""
    scales = tl.reshape(tl.join(low, high), [8, 4, WARPS, BLOCKS, 2])
    by_row = tl.reshape(tl.permute(scales, (2, 3, 4, 0, 1)), [WARPS, BLOCKS * 16, 4, 1])
    wide = tl.broadcast_to(by_row, [WARPS, BLOCKS * 16, 4, 2])
    return total + part * tl.reshape(wide, [WARPS, BLOCKS * 16, 8])


@triton.jit
def _vectors(address, chunk, CHUNKS: tl.constexpr, WARPS: tl.constexpr, SPREAD: tl.constexpr):
    """Load four activations a lane as an operand [WARPS, 16, 8]; zeros behind the last chunk."""
    if CHUNKS % WARPS == 0:
        values = tl.load(address)
    else:
        values = tl.load(address, mask=(chunk < CHUNKS)[None, :, None], other=0.0)
    return halves(values, WARPS, SPREAD)


@triton.jit
def stream_rows(
    vectors,
    codes,
    scales,
    blocks,
    levels,
    K: tl.constexpr,
    CODEC: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Return float32 [BLOCKS * 16, 8]: the rows of some row blocks times 8 vectors.

    Args:
        vectors: Addresses bfloat16 [32] of the first element of vector lane // 4.
        codes: Address uint8 of the code plane of a matrix with K columns.
        scales: Address uint8 of its scale plane.
        blocks: Row blocks int32 [BLOCKS], all of which exist.
        levels: `ptx.W2_LEVELS`.
        K: Columns.
        CODEC: "w2", "fp4-mx" or "fp4-nv".
        BLOCKS: Number of row blocks, a power of two.
        WARPS: Warps of the program.
    """
    W2: tl.constexpr = CODEC == "w2"
    E4M3: tl.constexpr = CODEC == "fp4-nv"
    CHUNK: tl.constexpr = chunk_columns(CODEC, K)
    PER_BLOCK: tl.constexpr = scale_block_columns(K) // CHUNK
    WORDS: tl.constexpr = CHUNK // (32 if W2 else 16)
    BYTES: tl.constexpr = CHUNK // scale_group(CODEC)
    CHUNKS: tl.constexpr = K // CHUNK

    lane = tl.arange(0, 32)
    warp = tl.arange(0, WARPS)
    row = (lane // 4)[:, None, None]
    word_at = lane[:, None, None, None] * WORDS + tl.arange(0, WORDS)
    code_at = codes.to(tl.pointer_type(tl.int32)) + word_at
    vector_at = (vectors + 4 * (lane % 4))[:, None, None] + tl.arange(0, 4)
    total = tl.zeros([WARPS, BLOCKS * 16, 8], tl.float32)
    for start in range(0, CHUNKS, WARPS):
        chunk = start + warp
        own = chunk
        if CHUNKS % WARPS != 0:
            own = tl.minimum(chunk, CHUNKS - 1)
        block = (blocks[None, :] * CHUNKS + own[:, None])[None, :, :]
        words = step_words(tl.load(code_at + block[:, :, :, None] * (32 * WORDS)), WORDS)
        block = (blocks[None, :] * (CHUNKS // PER_BLOCK) + (own // PER_BLOCK)[:, None])[None, :, :]
        scale_at = (
            scales
            + (own % PER_BLOCK * BYTES)[None, :, None]
            + ((block * 16 + row) * (PER_BLOCK * BYTES))
        )
        low = scale_words(scale_at, BYTES)
        high = scale_words(scale_at + 8 * PER_BLOCK * BYTES, BYTES)
        for step in tl.static_range(CHUNK // 32):
            at = vector_at + (own * CHUNK)[None, :, None] + 32 * step
            first = _vectors(at, chunk, CHUNKS, WARPS, not W2)
            second = _vectors(at + 16, chunk, CHUNKS, WARPS, not W2)
            if W2:
                p = w2_pairs(words[step], levels)
                a = operand(p[0], p[1], p[2], p[3], BLOCKS, WARPS)
                b = operand(p[4], p[5], p[6], p[7], BLOCKS, WARPS)
            else:
                p = fp4_pairs(words[2 * step])
                a = operand(p[0], p[1], p[2], p[3], BLOCKS, WARPS)
                p = fp4_pairs(words[2 * step + 1])
                b = operand(p[0], p[1], p[2], p[3], BLOCKS, WARPS)
            part = tl.dot(a, first)
            if E4M3:
                scale = scale_value(low, 2 * step, True), scale_value(high, 2 * step, True)
                total = _accumulate(total, part, scale[0], scale[1], BLOCKS, WARPS)
                part = tl.dot(b, second)
                scale = scale_value(low, 2 * step + 1, True), scale_value(high, 2 * step + 1, True)
            else:
                part = tl.dot(b, second, part)
                scale = scale_value(low, step, False), scale_value(high, step, False)
            total = _accumulate(total, part, scale[0], scale[1], BLOCKS, WARPS)
    return tl.sum(total, 0)
