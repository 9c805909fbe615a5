"""What a pool of experts would have hit on a recorded trace, under several policies.

All pools start empty. A decode step finds what is resident when it begins; its misses then enter
the pool, as a repair would bring them. A prefill step is streamed: its misses do not enter. The
routing is the recorded one: that a repair may change the routing of later layers (second-order
misses) is not simulated.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from moet_core.residency import HALF_LIFE, MARGIN, Move, PoolPolicy, WorkingSetError, worst_case
from moet_core.traces import RoutingTrace

__all__ = ["POLICIES", "Figures", "Settings", "simulate"]

Mask = NDArray[np.bool_]


class Settings(msgspec.Struct, frozen=True):
    """How `moet` and the decayed LFU are set up.

    Attributes:
        half_life: Steps after which a use counts half.
        margin: See `moet_core.residency.PoolPolicy`.
        promotions: The most rows that enter between two steps.
        count_prompts: Let prefill count as use like decoding, not for recency alone.
    """

    half_life: float = HALF_LIFE
    margin: float = MARGIN
    promotions: int = 8
    count_prompts: bool = False


class Figures(msgspec.Struct, frozen=True):
    """What a simulation counted. Only decode steps count; prefill shapes the pool alone.

    Attributes:
        steps: Decode steps.
        clean: Those that found every expert resident.
        streamed: Those whose worst case is larger than the pool, so that nothing can repair them.
        routings: Experts of all tokens and layers.
        hits: Routings whose expert was resident when the step began.
        misses: Distinct absent experts, summed over the steps.
        moved: Rows brought into the pool, between the steps included.
    """

    steps: int
    clean: int
    streamed: int
    routings: int
    hits: int
    misses: int
    moved: int

    @property
    def hit_rate(self) -> float:
        """Share of the routings that hit."""
        return self.hits / self.routings

    @property
    def repaired(self) -> float:
        """Share of the steps that must be repaired; 0 where all are streamed."""
        return (self.steps - self.clean - self.streamed) / self.steps


class Pool(Protocol):
    """A pool under some policy; masks are bool [L, E]."""

    def resident(self) -> Mask:
        """Say what is in the pool."""

    def prefill(self, wanted: Mask) -> int:
        """Follow a streamed step of a prompt; return how many rows entered the pool."""

    def decode(self, wanted: Mask, fits: bool) -> int:
        """Follow a decode step; return how many rows entered the pool.

        Args:
            wanted: What the step was routed to.
            fits: The pool is large enough to repair any step of as many tokens.
        """


def simulate(trace: RoutingTrace, slots: int, policy: str, settings: Settings) -> Figures:
    """Run a trace through a pool of `slots` rows under a policy of `POLICIES`.

    Raises:
        ValueError: No such policy, no slots, or a trace without decode steps.
    """
    if policy not in POLICIES or slots < 1 or trace.prefill.all():
        raise ValueError(
            f"wanted a policy of {', '.join(POLICIES)}, one slot or more and a decode step, "
            f"got {policy!r}, {slots} slots and {np.count_nonzero(~trace.prefill)} decode steps"
        )
    pool = POLICIES[policy](trace, slots, settings)
    layers = np.arange(trace.layers)[:, None]
    steps = clean = streamed = routings = hits = misses = moved = 0
    for prefill, chosen in trace.steps():
        wanted = np.zeros((trace.layers, trace.experts), bool)
        wanted[layers, chosen] = True
        if prefill:
            moved += pool.prefill(wanted)
            continue
        resident = pool.resident()
        missing = int(np.count_nonzero(wanted & ~resident))
        fits = worst_case(trace.layers, trace.experts, trace.top_k, len(chosen)) <= slots
        steps += 1
        clean += missing == 0
        streamed += missing > 0 and not fits
        routings += chosen.size
        hits += int(np.count_nonzero(resident[layers, chosen]))
        misses += missing
        moved += pool.decode(wanted, fits)
    return Figures(steps, clean, streamed, routings, hits, misses, moved)


class _Moet:
    """The policy that serves, driven as the step loop drives it."""

    def __init__(self, trace: RoutingTrace, slots: int, settings: Settings) -> None:
        self.policy = PoolPolicy(
            layers=trace.layers,
            experts=trace.experts,
            slots=slots,
            half_life=settings.half_life,
            margin=settings.margin,
        )
        self.settings = settings
        self.coming: list[Move] = []

    def resident(self) -> Mask:
        return self.policy.slot_of >= 0

    def prefill(self, wanted: Mask) -> int:
        self.policy.note(wanted, prompt=not self.settings.count_prompts)
        return self._end_step()

    def decode(self, wanted: Mask, fits: bool) -> int:
        if not fits:
            self.policy.note(wanted)
            return self._end_step()
        missing = self.policy.want(wanted)
        try:
            moves = self.policy.plan(missing)
        except WorkingSetError:
            self._arrive()
            moves = self.policy.plan(missing)
        self.policy.publish(moves)
        return len(moves) + self._end_step()

    def _arrive(self) -> None:
        self.policy.publish(self.coming)
        self.coming = []

    def _end_step(self) -> int:
        """Promotions travel during the next step and can be used by the one after it."""
        self._arrive()
        self.coming = self.policy.promotions(self.settings.promotions)
        self.policy.begin_step()
        return len(self.coming)


class _Ranked:
    """A textbook cache: what a decode step wanted enters, the lowest of a ranking leave.

    Where a step wants more than there are slots, the highest of the ranking stay. Prefill leaves
    no trace.
    """

    def __init__(self, trace: RoutingTrace, slots: int, settings: Settings) -> None:
        count = trace.layers * trace.experts
        self.shape = trace.layers, trace.experts
        self.slots = slots
        self.held = np.zeros(count, bool)
        self.rank = np.zeros(count)
        self.last = np.zeros(count)
        self.step = 0
        self.decay = 0.5 ** (1 / settings.half_life)

    def resident(self) -> Mask:
        return self.held.reshape(self.shape).copy()

    def prefill(self, wanted: Mask) -> int:
        return 0

    def decode(self, wanted: Mask, fits: bool) -> int:
        flat = wanted.ravel()
        self.step += 1
        self.last[flat] = self.step
        self.score(flat)
        before = self.held.copy()
        keys = np.flatnonzero(self.held | flat)
        pinned = flat[keys] & (np.count_nonzero(flat) <= self.slots)
        order = np.lexsort((-keys, self.last[keys], self.rank[keys], pinned))
        self.held[:] = False
        self.held[keys[order[-self.slots :]]] = True
        return int(np.count_nonzero(self.held & ~before))

    def score(self, flat: Mask) -> None:
        raise NotImplementedError


class _Lru(_Ranked):
    def score(self, flat: Mask) -> None:
        self.rank[flat] = self.step


class _Lfu(_Ranked):
    def score(self, flat: Mask) -> None:
        self.rank[flat] += 1


class _DecayedLfu(_Ranked):
    def score(self, flat: Mask) -> None:
        self.rank *= self.decay
        self.rank[flat] += 1


class _Belady(_Ranked):
    """Belady's optimum: what will be decoded with furthest in the future leaves.

    No policy that brings an expert only when a decode step wants it misses fewer experts (Belady,
    IBM Systems Journal 5(2), 1966; all of a step's experts enter together).
    """

    def __init__(self, trace: RoutingTrace, slots: int, settings: Settings) -> None:
        super().__init__(trace, slots, settings)
        wanted = []
        for prefill, chosen in trace.steps():
            if not prefill:
                keys = chosen + np.arange(trace.layers)[:, None] * trace.experts
                wanted.append(np.unique(keys))
        next_use = np.full(len(self.rank), np.inf)
        self.next_uses = []
        for step in range(len(wanted) - 1, -1, -1):
            self.next_uses.append(next_use[wanted[step]])
            next_use[wanted[step]] = step
        # Popped from the end, the first step's come first.

    def score(self, flat: Mask) -> None:
        self.rank[flat] = -self.next_uses.pop()


POLICIES: dict[str, Callable[[RoutingTrace, int, Settings], Pool]] = {
    "moet": _Moet,
    "LRU": _Lru,
    "LFU": _Lfu,
    "LFU-decayed": _DecayedLfu,
    "Belady": _Belady,
}
"""By name, in the order of tables and plots."""
