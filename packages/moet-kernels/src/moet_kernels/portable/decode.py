"""The kernels of decode steps, up to 16 tokens: each expert's weights stream through once.

A program takes a tile of one expert's rows. It belongs to a pair (token, k); only the program of
the first pair with that expert works, for all of them, so that grouping needs no kernel of its own.
Neither the number of pairs nor where ids lie is compiled in: one kernel serves every step, and
none is compiled while a graph is captured.
"""

import triton
import triton.language as tl

from moet_kernels.portable.grouping import slot_or_absent
from moet_kernels.portable.stream import stream_rows

__all__ = ["combine", "down", "gate_up", "swiglu"]


@triton.jit
def _sharing(ids, expert, pairs, BLOCK: tl.constexpr):
    """Return pairs int32 [BLOCK], which of them want `expert`, and the first that does."""
    place = tl.arange(0, BLOCK)
    other = tl.load(ids + place, mask=place < pairs, other=0).to(tl.int32)
    same = (other == expert) & (place < pairs)
    return place, same, tl.min(tl.where(same, place, BLOCK))


@triton.jit
def _chosen(place, same, first, start):
    """Return the pairs int32 [8] numbered start to start + 7 among `same`, and which exist.

    Those that do not are `first`, so that their addresses are good; nobody stores their results.
    """
    number = tl.cumsum(same.to(tl.int32), 0) - 1
    wanted = start + tl.arange(0, 8)
    hit = same[None, :] & (number[None, :] == wanted[:, None])
    exists = wanted < tl.sum(same.to(tl.int32))
    return tl.where(exists, tl.sum(tl.where(hit, place[None, :], 0), 1), first), exists


@triton.jit
def _by_lane(values):
    """Spread values [8] over lanes [32], lane // 4."""
    return tl.reshape(tl.broadcast_to(values[:, None], [8, 4]), [32])


@triton.jit
def _gate_up_rows(
    vectors,
    pool,
    slot,
    tile,
    levels,
    TIER: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Return gate and up float32 [BLOCKS * 16, 8] of a tile of the row in a slot."""
    CODEC: tl.constexpr = TIER[0]
    row = pool + slot.to(tl.int64) * TIER[1]
    OF_EACH: tl.constexpr = INTERMEDIATE // 16
    index = tl.arange(0, 2 * BLOCKS)
    own = tl.minimum(tile * BLOCKS + index % BLOCKS, OF_EACH - 1)
    both = stream_rows(
        vectors,
        row + TIER[2],
        row + TIER[3],
        own + index // BLOCKS * OF_EACH,
        levels,
        HIDDEN,
        CODEC,
        2 * BLOCKS,
        WARPS,
    )
    gate, up = tl.split(tl.permute(tl.reshape(both, [2, BLOCKS * 16, 8]), (1, 2, 0)))
    if CODEC == "fp4-nv":
        scale = (row + TIER[6]).to(tl.pointer_type(tl.float32))
        gate *= tl.load(scale)
        up *= tl.load(scale + 1)
    return gate, up


@triton.jit
def swiglu(gate, up, limit, CLAMP: tl.constexpr):
    """Return silu(gate) * up in float32; CLAMP: gate at most limit, up in -limit..limit."""
    if CLAMP:
        gate = tl.minimum(gate, limit, tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, tl.PropagateNan.ALL)
    return gate / (1 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["pairs"], do_not_specialize_on_alignment=["ids"])
def gate_up(
    x,
    ids,
    base_slot_of,
    base_pool,
    fine_slot_of,
    fine_pool,
    activated,
    missing,
    wanted,
    pairs,
    experts,
    levels,
    limit,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    BASE: tl.constexpr,
    FINE: tl.constexpr,
    CLAMP: tl.constexpr,
    COUNT: tl.constexpr,
    MARK: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Write silu(gate(x)) * up(x), bfloat16 [pairs, I], of a tile of rows and one expert's pairs.

    With MARK, also sets `wanted` of the expert; with COUNT, counts it in `missing` if it has no
    slot. BASE and FINE are `row_constants`, FINE () without one. Grid: (tiles of BLOCKS * 16
    rows, pairs).
    """
    tile = tl.program_id(0)
    pair = tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int32)
    place, same, first = _sharing(ids, expert, pairs, PAIRS)
    if first != pair:
        return
    base = slot_or_absent(base_slot_of, expert, experts)
    fine = base * 0 - 1
    if len(FINE) > 0:
        fine = slot_or_absent(fine_slot_of, expert, experts)
    if tile == 0:
        if MARK:
            tl.store(wanted + expert, 1, mask=(expert >= 0) & (expert < experts))
        if COUNT:
            tl.atomic_add(missing, 1, mask=(base < 0) & (fine < 0))
    if (base < 0) & (fine < 0):
        return
    for start in range(0, tl.sum(same.to(tl.int32)), 8):
        chosen, exists = _chosen(place, same, first, start)
        vectors = x + _by_lane(chosen // TOP_K) * HIDDEN
        if len(FINE) > 0:
            if fine >= 0:
                gate, up = _gate_up_rows(
                    vectors,
                    fine_pool,
                    fine,
                    tile,
                    levels,
                    FINE,
                    HIDDEN,
                    INTERMEDIATE,
                    BLOCKS,
                    WARPS,
                )
            else:
                gate, up = _gate_up_rows(
                    vectors,
                    base_pool,
                    base,
                    tile,
                    levels,
                    BASE,
                    HIDDEN,
                    INTERMEDIATE,
                    BLOCKS,
                    WARPS,
                )
        else:
            gate, up = _gate_up_rows(
                vectors, base_pool, base, tile, levels, BASE, HIDDEN, INTERMEDIATE, BLOCKS, WARPS
            )
        result = swiglu(gate, up, limit, CLAMP).to(tl.bfloat16)
        row = tile * (BLOCKS * 16) + tl.arange(0, BLOCKS * 16)
        at = activated + chosen[None, :] * INTERMEDIATE + row[:, None]
        tl.store(at, result, mask=exists[None, :] & (row < INTERMEDIATE)[:, None])


@triton.jit
def _down_rows(
    vectors,
    pool,
    slot,
    tile,
    levels,
    TIER: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Return the down projection float32 [BLOCKS * 16, 8] of a tile of the row in a slot."""
    CODEC: tl.constexpr = TIER[0]
    row = pool + slot.to(tl.int64) * TIER[1]
    own = tl.minimum(tile * BLOCKS + tl.arange(0, BLOCKS), HIDDEN // 16 - 1)
    result = stream_rows(
        vectors,
        row + TIER[4],
        row + TIER[5],
        own,
        levels,
        INTERMEDIATE,
        CODEC,
        BLOCKS,
        WARPS,
    )
    if CODEC == "fp4-nv":
        result *= tl.load((row + TIER[6]).to(tl.pointer_type(tl.float32)) + 2)
    return result


@triton.jit(do_not_specialize=["pairs"], do_not_specialize_on_alignment=["ids"])
def down(
    activated,
    ids,
    base_slot_of,
    base_pool,
    fine_slot_of,
    fine_pool,
    parts,
    pairs,
    experts,
    levels,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    BASE: tl.constexpr,
    FINE: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Write the down projection of `activated`, float32 [pairs, H], of one expert's pairs.

    Rows of pairs whose expert is absent stay as they are. Grid: (tiles of BLOCKS * 16 rows, pairs).
    """
    tile = tl.program_id(0)
    pair = tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int32)
    place, same, first = _sharing(ids, expert, pairs, PAIRS)
    if first != pair:
        return
    base = slot_or_absent(base_slot_of, expert, experts)
    fine = base * 0 - 1
    if len(FINE) > 0:
        fine = slot_or_absent(fine_slot_of, expert, experts)
    if (base < 0) & (fine < 0):
        return
    for start in range(0, tl.sum(same.to(tl.int32)), 8):
        chosen, exists = _chosen(place, same, first, start)
        vectors = activated + _by_lane(chosen) * INTERMEDIATE
        if len(FINE) > 0:
            if fine >= 0:
                result = _down_rows(
                    vectors,
                    fine_pool,
                    fine,
                    tile,
                    levels,
                    FINE,
                    HIDDEN,
                    INTERMEDIATE,
                    BLOCKS,
                    WARPS,
                )
            else:
                result = _down_rows(
                    vectors,
                    base_pool,
                    base,
                    tile,
                    levels,
                    BASE,
                    HIDDEN,
                    INTERMEDIATE,
                    BLOCKS,
                    WARPS,
                )
        else:
            result = _down_rows(
                vectors, base_pool, base, tile, levels, BASE, HIDDEN, INTERMEDIATE, BLOCKS, WARPS
            )
        row = tile * (BLOCKS * 16) + tl.arange(0, BLOCKS * 16)
        at = parts + chosen[None, :] * HIDDEN + row[:, None]
        tl.store(at, result, mask=exists[None, :] & (row < HIDDEN)[:, None])


@triton.jit(do_not_specialize_on_alignment=["weights", "ids"])
def combine(
    parts,
    weights,
    ids,
    base_slot_of,
    fine_slot_of,
    out,
    experts,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    FINE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the weighted sum of each token's parts, k ascending, bfloat16 [tokens, H].

    Parts of absent experts are not read. Grid: (tokens, tiles of BLOCK columns).
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.load(ids + pair).to(tl.int32)
        present = slot_or_absent(base_slot_of, expert, experts) >= 0
        if FINE:
            present |= slot_or_absent(fine_slot_of, expert, experts) >= 0
        part = tl.load(parts + pair * HIDDEN + column, mask=present & (column < HIDDEN), other=0.0)
        total += part * tl.load(weights + pair)
    tl.store(out + token * HIDDEN + column, total.to(tl.bfloat16), mask=column < HIDDEN)
