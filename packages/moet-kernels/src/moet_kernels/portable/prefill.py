"""The kernels of prefill: tiles of 128 rows of weights times a group of vectors of one expert."""

import triton
import triton.language as tl

from moet_kernels.portable.decode import swiglu
from moet_kernels.portable.grouping import slot_or_absent
from moet_kernels.portable.tiles import arranged, decoded_chunk
from moet_kernels.portable.weights import chunk_columns

__all__ = ["arrange", "down_tiles", "gate_up_tiles"]


@triton.jit
def arrange(x, out, HIDDEN: tl.constexpr, SPREAD: tl.constexpr, BLOCK: tl.constexpr):
    """Write x bfloat16 [tokens, H] in the operands' column order. Grid: (tokens, tiles)."""
    at = tl.program_id(0).to(tl.int64) * HIDDEN
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at + column, mask=column < HIDDEN, other=0.0)
    ordered = tl.reshape(arranged(values[None, :], 1, BLOCK, SPREAD), [BLOCK])
    tl.store(out + at + column, ordered, mask=column < HIDDEN)


@triton.jit
def _pair_rows(
    vectors,
    row,
    tile,
    levels,
    CODEC: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return gate and up float32 [BLOCKS * 16, GROUP] of a tile.

    The operand's rows alternate 8 of gate and 8 of up, so that one thread gets both of a row.
    """
    CHUNK: tl.constexpr = chunk_columns(CODEC, HIDDEN)
    OF_EACH: tl.constexpr = INTERMEDIATE // 16
    index = tl.arange(0, 2 * BLOCKS)
    own = tl.minimum(tile * BLOCKS + index % BLOCKS, OF_EACH - 1) + index // BLOCKS * OF_EACH
    total = tl.zeros([BLOCKS * 32, GROUP], tl.float32)
    for chunk in range(HIDDEN // CHUNK):
        x = tl.load(vectors[None, :] + chunk * CHUNK + tl.arange(0, CHUNK)[:, None])
        w = decoded_chunk(row + CODES, row + SCALES, own, chunk, levels, HIDDEN, CODEC, 2 * BLOCKS)
        parts = tl.reshape(w, [8, 2, 2, BLOCKS, CHUNK])
        # [tile, block, gate or up, g, column]
        w = tl.reshape(tl.permute(parts, (1, 3, 2, 0, 4)), [BLOCKS * 32, CHUNK])
        total = tl.dot(w, x, total)
    by_row = tl.reshape(total, [2, BLOCKS, 2, 8, GROUP])
    gate, up = tl.split(tl.permute(by_row, (1, 0, 3, 4, 2)))
    return tl.reshape(gate, [BLOCKS * 16, GROUP]), tl.reshape(up, [BLOCKS * 16, GROUP])


@triton.jit
def _gate_up_tile(
    vectors,
    pool,
    slot,
    tile,
    levels,
    limit,
    activated,
    pair,
    TIER: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    CLAMP: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute and store a tile of activations, columns in the operands' order of the tier."""
    CODEC: tl.constexpr = TIER[0]
    row = pool + slot.to(tl.int64) * TIER[1]
    gate, up = _pair_rows(
        vectors,
        row,
        tile,
        levels,
        CODEC,
        HIDDEN,
        INTERMEDIATE,
        TIER[2],
        TIER[3],
        BLOCKS,
        GROUP,
    )
    if CODEC == "fp4-nv":
        scale = (row + TIER[6]).to(tl.pointer_type(tl.float32))
        gate *= tl.load(scale)
        up *= tl.load(scale + 1)
    result = tl.trans(swiglu(gate, up, limit, CLAMP).to(tl.bfloat16))
    result = arranged(result, GROUP, BLOCKS * 16, CODEC != "w2")
    column = tile * (BLOCKS * 16) + tl.arange(0, BLOCKS * 16)
    at = activated + pair.to(tl.int64)[:, None] * INTERMEDIATE + column[None, :]
    tl.store(at, result, mask=(pair >= 0)[:, None] & (column < INTERMEDIATE)[None, :])


@triton.jit
def gate_up_tiles(
    base_x,
    fine_x,
    order,
    expert_of,
    base_slot_of,
    base_pool,
    fine_slot_of,
    fine_pool,
    activated,
    experts,
    levels,
    limit,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    BASE: tl.constexpr,
    FINE: tl.constexpr,
    CLAMP: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write silu(gate(x)) * up(x), bfloat16 [pairs, I], of a group of pairs and a tile of rows.

    Both x are `arrange`d for their tier. Grid: (tiles of BLOCKS * 16 rows, groups).
    """
    tile = tl.program_id(0)
    group = tl.program_id(1)
    expert = tl.load(expert_of + group)
    if expert < 0:
        return
    pair = tl.load(order + group * GROUP + tl.arange(0, GROUP))
    at = (tl.maximum(pair, 0) // TOP_K).to(tl.int64) * HIDDEN
    base = slot_or_absent(base_slot_of, expert, experts)
    if len(FINE) > 0:
        fine = slot_or_absent(fine_slot_of, expert, experts)
        if fine >= 0:
            _gate_up_tile(
                fine_x + at,
                fine_pool,
                fine,
                tile,
                levels,
                limit,
                activated,
                pair,
                FINE,
                HIDDEN,
                INTERMEDIATE,
                CLAMP,
                BLOCKS,
                GROUP,
            )
            return
    _gate_up_tile(
        base_x + at,
        base_pool,
        base,
        tile,
        levels,
        limit,
        activated,
        pair,
        BASE,
        HIDDEN,
        INTERMEDIATE,
        CLAMP,
        BLOCKS,
        GROUP,
    )


@triton.jit
def _down_tile(
    activated,
    pool,
    slot,
    tile,
    levels,
    parts,
    pair,
    TIER: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute and store a tile of the down projection."""
    CODEC: tl.constexpr = TIER[0]
    CHUNK: tl.constexpr = chunk_columns(CODEC, INTERMEDIATE)
    row = pool + slot.to(tl.int64) * TIER[1]
    own = tl.minimum(tile * BLOCKS + tl.arange(0, BLOCKS), HIDDEN // 16 - 1)
    vectors = activated + tl.maximum(pair, 0).to(tl.int64) * INTERMEDIATE
    total = tl.zeros([BLOCKS * 16, GROUP], tl.float32)
    for chunk in range(INTERMEDIATE // CHUNK):
        x = tl.load(vectors[None, :] + chunk * CHUNK + tl.arange(0, CHUNK)[:, None])
        w = decoded_chunk(
            row + TIER[4], row + TIER[5], own, chunk, levels, INTERMEDIATE, CODEC, BLOCKS
        )
        # [block, tile, g, column]
        w = tl.reshape(tl.permute(w, (2, 1, 0, 3)), [BLOCKS * 16, CHUNK])
        total = tl.dot(w, x, total)
    if CODEC == "fp4-nv":
        total *= tl.load((row + TIER[6]).to(tl.pointer_type(tl.float32)) + 2)
    column = tile * (BLOCKS * 16) + tl.arange(0, BLOCKS * 16)
    at = parts + tl.maximum(pair, 0).to(tl.int64)[None, :] * HIDDEN + column[:, None]
    tl.store(at, total, mask=(pair >= 0)[None, :] & (column < HIDDEN)[:, None])


@triton.jit
def down_tiles(
    activated,
    order,
    expert_of,
    base_slot_of,
    base_pool,
    fine_slot_of,
    fine_pool,
    parts,
    experts,
    levels,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    BASE: tl.constexpr,
    FINE: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write the down projection of `activated`, float32 [pairs, H], of a group and a tile.

    Grid: (tiles of BLOCKS * 16 rows, groups).
    """
    tile = tl.program_id(0)
    group = tl.program_id(1)
    expert = tl.load(expert_of + group)
    if expert < 0:
        return
    pair = tl.load(order + group * GROUP + tl.arange(0, GROUP))
    base = slot_or_absent(base_slot_of, expert, experts)
    if len(FINE) > 0:
        fine = slot_or_absent(fine_slot_of, expert, experts)
        if fine >= 0:
            _down_tile(
                activated,
                fine_pool,
                fine,
                tile,
                levels,
                parts,
                pair,
                FINE,
                HIDDEN,
                INTERMEDIATE,
                BLOCKS,
                GROUP,
            )
            return
    _down_tile(
        activated,
        base_pool,
        base,
        tile,
        levels,
        parts,
        pair,
        BASE,
        HIDDEN,
        INTERMEDIATE,
        BLOCKS,
        GROUP,
    )
