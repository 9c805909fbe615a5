"""Pairs (token, k) grouped by expert, on the device, in an order that is always the same."""

import triton
import triton.language as tl

__all__ = ["count", "mark", "slot_or_absent", "sort"]


@triton.jit
def slot_or_absent(slot_of, expert, experts):
    """Return the slot of an expert, -1 for one that is absent or does not exist."""
    known = (expert >= 0) & (expert < experts)
    return tl.load(slot_of + expert, mask=known, other=-1)


@triton.jit
def _present(base_slot_of, fine_slot_of, expert, experts, FINE: tl.constexpr):
    present = slot_or_absent(base_slot_of, expert, experts) >= 0
    if FINE:
        present |= slot_or_absent(fine_slot_of, expert, experts) >= 0
    return present


@triton.jit
def _matches(ids, expert, pairs, BLOCK: tl.constexpr):
    """Count the pairs of an expert."""
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        place = start + tl.arange(0, BLOCK)
        other = tl.load(ids + place, mask=place < pairs, other=0).to(tl.int32)
        found += ((other == expert) & (place < pairs)).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit(do_not_specialize=["pairs"], do_not_specialize_on_alignment=["ids"])
def mark(
    ids,
    base_slot_of,
    fine_slot_of,
    missing,
    wanted,
    pairs,
    experts,
    FINE: tl.constexpr,
    COUNT: tl.constexpr,
    MARK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set `wanted` of every expert routed to (MARK) and count the absent among them (COUNT).

    The last program counts ids that name no expert, as one absent expert. Grid: (experts + 1,).
    """
    expert = tl.program_id(0)
    if expert == experts:
        strangers = tl.zeros([BLOCK], tl.int32)
        for start in range(0, pairs, BLOCK):
            place = start + tl.arange(0, BLOCK)
            other = tl.load(ids + place, mask=place < pairs, other=0).to(tl.int32)
            strangers += ((other < 0) | (other >= experts)).to(tl.int32)
        if COUNT:
            tl.atomic_add(missing, 1, mask=tl.sum(strangers, 0) > 0)
    else:
        routed = _matches(ids, expert, pairs, BLOCK) > 0
        if MARK:
            tl.store(wanted + expert, 1, mask=routed)
        if COUNT:
            present = _present(base_slot_of, fine_slot_of, expert, experts, FINE)
            tl.atomic_add(missing, 1, mask=routed & (present == 0))


@triton.jit(do_not_specialize=["pairs"], do_not_specialize_on_alignment=["ids"])
def count(
    ids,
    base_slot_of,
    fine_slot_of,
    counts,
    pairs,
    experts,
    FINE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the number of pairs of each present expert, 0 of others, int32 [E].

    Grid: (experts,).
    """
    expert = tl.program_id(0)
    found = _matches(ids, expert, pairs, BLOCK)
    present = _present(base_slot_of, fine_slot_of, expert, experts, FINE)
    tl.store(counts + expert, tl.where(present, found, 0))


@triton.jit(do_not_specialize=["pairs", "groups"], do_not_specialize_on_alignment=["ids"])
def sort(
    ids,
    counts,
    order,
    expert_of,
    pairs,
    experts,
    groups,
    GROUP: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write pairs in groups of GROUP that share an expert. Grid: (experts,).

    Args:
        ids: Expert of each pair.
        counts: From `count`.
        order: int32 [groups * GROUP]; pairs ascending within an expert, -1 where a group ends.
        expert_of: int32 [groups]; -1 behind the last group.
        pairs: Number of pairs.
        experts: Number of experts.
        groups: Upper bound on the number of groups.
        GROUP: Pairs of a group.
        EXPERTS: A power of two, at least `experts`.
        BLOCK: Pairs read at a time.
    """
    expert = tl.program_id(0)
    every = tl.arange(0, EXPERTS)
    sizes = tl.load(counts + every, mask=every < experts, other=0)
    needed = (sizes + GROUP - 1) // GROUP
    first = tl.sum(tl.where(every < expert, needed, 0), 0)
    own = tl.sum(tl.where(every == expert, needed, 0), 0)
    if expert == experts - 1:
        for group in range(first + own, groups):
            tl.store(expert_of + group, -1)
    if own > 0:
        filled = first * GROUP
        for start in range(0, pairs, BLOCK):
            place = start + tl.arange(0, BLOCK)
            other = tl.load(ids + place, mask=place < pairs, other=0).to(tl.int32)
            same = (other == expert) & (place < pairs)
            at = filled + tl.cumsum(same.to(tl.int32), 0) - 1
            tl.store(order + at, place, mask=same)
            filled += tl.sum(same.to(tl.int32), 0)
        rest = filled + tl.arange(0, GROUP)
        tl.store(order + rest, -1, mask=rest < (first + own) * GROUP)
        for group in range(first, first + own):
            tl.store(expert_of + group, expert)
