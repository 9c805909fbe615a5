"""Which experts a pool of slots holds: the policy of a GPU that is a cache of experts.

A pure state machine. It moves no bytes: it says which key goes into which slot, and is told when
the bytes are there. One caller, the step loop, owns it; nothing here is safe to share between
threads. Equal calls give equal decisions on every machine, so that each tensor-parallel rank can
run a copy of its own.

A slot is free, being filled or owned by the key whose bytes it holds. Keys are (layer, expert),
with the layers of this rank counted densely from 0.

The value of an expert is the number of steps that used it, each decayed by its age. Instead of
letting old uses shrink, new ones weigh more, by 2 ** (step / half_life): an order between two
experts then never changes by rounding, and a step costs no pass over the table (forward decay,
Cormode, Shkapenyuk, Srivastava and Xu, ICDE 2009).
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from moet_core.errors import MoetError

__all__ = ["Key", "Move", "PoolError", "PoolPolicy", "WorkingSetError", "worst_case"]

Key = tuple[int, int]

HALF_LIFE = 256.0
"""Steps; what other half-lives and margins do is in docs/residency.md."""

MARGIN = 1.0
"""Uses."""

NEVER = -(2**62)
"""Last use of an expert that was neither used nor preloaded."""

REBASE = 256
"""Half-lives after which weights start at 1 again; far below the 1023 that a float64 can double."""


class Move(msgspec.Struct, frozen=True):
    """Bring `key` into `slot`; `evicted` is the key that lost the slot, None if it was free."""

    key: Key
    slot: int
    evicted: Key | None


class PoolError(MoetError):
    """Tables that contradict each other, or a move that the pool does not know.

    Args:
        wanted: What must hold, as a noun phrase.
        found: What is there instead, as a noun phrase.
    """

    def __init__(self, wanted: str, found: str) -> None:
        super().__init__(f"Expert pool: wanted {wanted}, found {found}. Please report it.")
        self.wanted = wanted
        self.found = found

    def __reduce__(self) -> tuple[type["PoolError"], tuple[str, str]]:
        return PoolError, (self.wanted, self.found)


class WorkingSetError(MoetError):
    """A step that needs more experts at once than the pool can hold; nothing was changed.

    Args:
        slots: Slots of the pool.
        pinned: Slots that hold a row of this step.
        filling: Slots whose rows are on their way.
        wanted: Slots that the step needs besides.
    """

    def __init__(self, slots: int, pinned: int, filling: int, wanted: int) -> None:
        super().__init__(
            f"Expert pool: wanted {wanted} slots for experts that this step needs, found "
            f"{slots - pinned - filling} of {slots}: {pinned} hold experts of the step and "
            f"{filling} are being filled. Wait for the moves on their way and plan again, run the "
            "step layer by layer, or make the pool larger."
        )
        self.slots = slots
        self.pinned = pinned
        self.filling = filling
        self.wanted = wanted

    def __reduce__(self) -> tuple[type["WorkingSetError"], tuple[int, int, int, int]]:
        return WorkingSetError, (self.slots, self.pinned, self.filling, self.wanted)


def worst_case(layers: int, experts: int, top_k: int, tokens: int) -> int:
    """Return the most distinct experts that a step of `tokens` tokens can be routed to.

    A pool with so many slots can repair every such step; with fewer the step must be streamed.
    """
    return layers * min(experts, tokens * top_k)


class PoolPolicy:
    """Decides what a pool of slots holds.

    A step: `begin_step`; after each forward pass `want` what it was routed to, `plan` what was
    missing, read, `publish`. Between steps: `promotions`, read, and `publish` at some later time.

    Args:
        layers: Layers with routed experts of this rank, L.
        experts: Routed experts of a layer, E.
        slots: Rows that fit into the pool.
        half_life: Steps after which a use counts half.
        margin: Uses by which an absent expert must exceed a resident one to replace it between
            steps; it keeps two experts of like value from replacing each other in turns.

    Attributes:
        slot_of: int32 [L, E], the slot of each expert whose bytes are there, -1 for the others.
            Read-only; it follows every change.
        step: Number of the current step, from 1.
        evictions: Rows that lost their slot to another.

    Raises:
        ValueError: An argument out of its range.
    """

    def __init__(
        self,
        *,
        layers: int,
        experts: int,
        slots: int,
        half_life: float = HALF_LIFE,
        margin: float = MARGIN,
    ) -> None:
        if min(layers, experts, slots) < 1:
            raise ValueError(
                f"layers, experts and slots must be 1 or more, got {layers}, {experts}, {slots}"
            )
        if not half_life > 0 or not margin >= 0:
            raise ValueError(
                f"half_life must be positive and margin not negative, got {half_life}, {margin}"
            )
        self.layers = layers
        self.experts = experts
        self.slots = slots
        self.half_life = half_life
        self.margin = margin
        self.step = 1
        self.evictions = 0
        # Tables by key are flat: key (layer, expert) is at layer * experts + expert.
        count = layers * experts
        self._slot_of = np.full(count, -1, np.int32)
        self.slot_of = self._slot_of.reshape(layers, experts)
        self.slot_of.flags.writeable = False
        self._coming = np.zeros(count, bool)
        self._owner = np.full(slots, -1, np.int64)
        self._filling = np.full(slots, -1, np.int64)
        self._free = list(range(slots - 1, -1, -1))
        self._score = np.zeros(count)
        self._last = np.full(count, NEVER, np.int64)
        self._preloaded = 0
        self._epoch = 0.0
        self._weight = 2.0 ** (1 / half_life)
        self._counted = np.zeros(count, bool)
        self._step_wanted = np.zeros(count, bool)
        self._pass_wanted = np.zeros(count, bool)
        self._settled = False

    @property
    def resident(self) -> int:
        """Number of experts whose bytes are in a slot."""
        return int(np.count_nonzero(self._owner >= 0))

    def begin_step(self) -> None:
        """End the former step and with it all its pins; moves on their way stay on their way."""
        self._step_wanted[:] = False
        self._pass_wanted[:] = False
        self._counted[:] = False
        self.step += 1
        if self.step - self._epoch > REBASE * self.half_life:
            self._epoch += REBASE * self.half_life
            self._score *= 2.0**-REBASE
        self._weight = 2.0 ** ((self.step - self._epoch) / self.half_life)

    def want(self, wanted: NDArray[np.bool_]) -> list[Key]:
        """Pin what one forward pass of this step was routed to, and count it as used.

        Call it once a pass, with all that this pass was routed to. Experts of earlier passes of
        the step stay pinned as long as that leaves room: once repaired, a layer may route the next
        one elsewhere, and what only the former routing needed must not block the pool.

        Args:
            wanted: bool [L, E].

        Returns:
            Those of them that are absent, newly or still, ascending; also those on their way.
        """
        flat = self._flat(wanted)
        used = np.flatnonzero(flat)
        self._use(used)
        self._pass_wanted[:] = flat
        self._step_wanted |= flat
        absent = used[self._slot_of[used] < 0]
        if len(absent):
            self._settled = False
        return self._keys(absent)

    def note(self, wanted: NDArray[np.bool_], *, prompt: bool = False) -> None:
        """Count experts as used by this step without pinning them: a streamed step needs no slot.

        Args:
            wanted: bool [L, E].
            prompt: The step read prompts, perhaps beside decoding. Only recency counts then: what
                prompts are routed to says little about what decoding will need, and one prompt is
                routed to almost everything (docs/residency.md has the figures).
        """
        used = np.flatnonzero(self._flat(wanted))
        self._settled = False
        if prompt:
            self._last[used] = self.step
        else:
            self._use(used)

    def plan(self, keys: Iterable[Key]) -> list[Move]:
        """Reserve a slot for each expert that this step needs, and pin it.

        Free slots go first, then those of the least valuable experts that no pass of this step
        wanted, then those that only earlier passes wanted. Evicted experts are absent at once.
        Experts that are present or on their way get no move; who needs one that is on its way
        waits until its move is published.

        Raises:
            WorkingSetError: There are too few such slots; nothing was reserved, evicted or pinned.
        """
        wanted = self._indices(keys)
        pinned = self._pass_wanted.copy()
        pinned[wanted] = True
        absent = wanted[(self._slot_of[wanted] < 0) & ~self._coming[wanted]]
        short = len(absent) - len(self._free)
        victims = np.empty(0, np.int64)
        if short > 0:
            resident = self._owner[self._owner >= 0]
            evictable = resident[~pinned[resident]]
            if len(evictable) < short:
                raise WorkingSetError(
                    self.slots,
                    len(resident) - len(evictable),
                    int(np.count_nonzero(self._filling >= 0)),
                    len(absent),
                )
            earlier = self._step_wanted[evictable]
            victims = self._lowest(evictable[~earlier], short)
            rest = self._lowest(evictable[earlier], short - len(victims))
            victims = np.concatenate((victims, rest))
        self._pass_wanted = pinned
        self._step_wanted[wanted] = True
        self._settled = False
        return self._reserve(absent, victims)

    def promotions(self, limit: int) -> list[Move]:
        """Reserve slots for absent experts that are worth more than what the slots hold.

        Free slots take the most valuable absent experts that were ever used. Beyond them an expert
        takes a slot only from one that this step does not want and whose value it exceeds by more
        than `margin` uses.

        Args:
            limit: The most moves to return.
        """
        if self._settled:
            return []
        absent = np.flatnonzero((self._slot_of < 0) & ~self._coming & (self._last > 0))
        best = self._highest(absent, limit)
        free = len(self._free)
        resident = self._owner[self._owner >= 0]
        self._settled = self._is_settled(len(absent) - len(best), best[free:], resident)
        worst = self._lowest(resident[~self._step_wanted[resident]], len(best) - free)
        # The best descend and the worst ascend, so that the first pair that fails ends it.
        gain = self._score[best[free : free + len(worst)]] - self._score[worst]
        replaced = int(np.count_nonzero(gain > self.margin * self._weight))
        return self._reserve(best[: free + replaced], worst[:replaced])

    def preload(self, keys: Iterable[Key]) -> list[Move]:
        """Reserve free slots for the experts that were hot at an earlier time, hottest first.

        Evicts nothing and leaves out what finds no free slot. Until they are used they are worth
        nothing but keep their order: the hottest is the last to go.
        """
        wanted = self._indices(keys)
        absent = wanted[(self._slot_of[wanted] < 0) & ~self._coming[wanted]][: len(self._free)]
        unused = absent[self._last[absent] == NEVER]
        self._last[unused] = -1 - self._preloaded - np.arange(len(unused))
        self._preloaded += len(unused)
        return self._reserve(absent, np.empty(0, np.int64))

    def publish(self, moves: Sequence[Move]) -> None:
        """Make experts present: their bytes are in the slots.

        Raises:
            PoolError: A move that was not reserved or has ended; nothing was changed.
        """
        slots, keys = self._end(moves)
        self._owner[slots] = keys
        self._slot_of[keys] = slots

    def abandon(self, moves: Sequence[Move]) -> None:
        """Free the slots of moves whose bytes could not be read; the experts stay absent.

        Raises:
            PoolError: A move that was not reserved or has ended; nothing was changed.
        """
        slots, _ = self._end(moves)
        self._free.extend(slots.tolist())
        self._settled = False

    def hottest(self) -> list[Key]:
        """Return the resident experts, the most valuable first."""
        resident = self._owner[self._owner >= 0]
        return self._keys(self._highest(resident, len(resident)))

    def check_integrity(self) -> None:
        """Check that each slot is free, being filled or owned, and that the tables agree.

        Raises:
            PoolError: They do not; it names the first slot or expert that is wrong.
        """
        states = np.zeros(self.slots, np.int64)
        np.add.at(states, self._free, 1)
        states += (self._filling >= 0).astype(np.int64) + (self._owner >= 0)
        for slot in np.flatnonzero(states != 1).tolist():
            raise PoolError(
                f"slot {slot} once among free, filling and owned", f"it {states[slot]} times"
            )
        owned, filling = np.flatnonzero(self._owner >= 0), np.flatnonzero(self._filling >= 0)
        slot_of = np.full_like(self._slot_of, -1)
        slot_of[self._owner[owned]] = owned
        for key in np.flatnonzero(slot_of != self._slot_of).tolist():
            raise PoolError(
                f"expert {self._key(key)} in the slot that it owns, {slot_of[key]}",
                f"slot {self._slot_of[key]} in slot_of",
            )
        if self.resident != np.count_nonzero(slot_of >= 0):
            raise PoolError("one slot for each resident expert", "an expert that owns two")
        coming = np.zeros_like(self._coming)
        coming[self._filling[filling]] = True
        for key in np.flatnonzero(coming != self._coming).tolist():
            raise PoolError(
                f"expert {self._key(key)} {'on its way' if coming[key] else 'not on its way'}",
                "the opposite",
            )
        if len(filling) != np.count_nonzero(coming):
            raise PoolError("one slot for each expert on its way", "an expert with two")
        for key in np.flatnonzero(coming & (self._slot_of >= 0)).tolist():
            raise PoolError(f"expert {self._key(key)} absent while it is on its way", "it present")

    def _is_settled(self, left: int, best: NDArray[np.int64], resident: NDArray[np.int64]) -> bool:
        """Say whether there is nothing to promote until an absent expert is used or one evicted.

        Values of absent experts stand still until then, those of resident ones and the margin
        only grow.

        Args:
            left: Number of absent experts, ever used, beyond the most valuable ones.
            best: Those of the most valuable ones that find no free slot.
            resident: The resident experts, whether this step wants them or not.
        """
        if not len(best):
            return left == 0
        if not len(resident):
            return False
        gain = self._score[best[0]] - self._score[resident].min()
        return bool(gain <= self.margin * self._weight)

    def _use(self, keys: NDArray[np.intp]) -> None:
        """Count uses; an expert is used once a step at most."""
        self._score[keys[~self._counted[keys]]] += self._weight
        self._counted[keys] = True
        self._last[keys] = self.step

    def _reserve(self, keys: NDArray[np.int64], victims: NDArray[np.int64]) -> list[Move]:
        """Start to fill free slots, then the victims' slots, with absent keys, in their order."""
        free = len(keys) - len(victims)
        slots = [self._free.pop() for _ in range(free)] + self._slot_of[victims].tolist()
        self._slot_of[victims] = -1
        self._owner[slots] = -1
        self._filling[slots] = keys
        self._coming[keys] = True
        self.evictions += len(victims)
        evicted = [None] * free + self._keys(victims)
        return [Move(*move) for move in zip(self._keys(keys), slots, evicted, strict=True)]

    def _end(self, moves: Sequence[Move]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Take moves off the way; return their slots and keys."""
        slots = np.array([move.slot for move in moves], np.int64)
        keys = np.array([m.key[0] * self.experts + m.key[1] for m in moves], np.int64)
        if len(slots) and not (slots.min() >= 0 and slots.max() < self.slots):
            raise PoolError(f"slots below {self.slots}", f"{slots.min()} to {slots.max()}")
        for index in np.flatnonzero(self._filling[slots] != keys).tolist():
            found = int(self._filling[slots[index]])
            what = "nothing" if found < 0 else f"{self._key(found)}"
            raise PoolError(
                f"{moves[index].key} on its way into slot {slots[index]}", f"{what} there"
            )
        if len(set(slots.tolist())) != len(slots):
            raise PoolError("every move once", "one of them twice")
        self._filling[slots] = -1
        self._coming[keys] = False
        return slots, keys

    def _highest(self, keys: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return the `count` most valuable keys, descending: by value, recency, then lowest key."""
        if count <= 0:
            return keys[:0]
        if count < len(keys):
            score = self._score[keys]
            keys = keys[score >= np.partition(score, -count)[-count]]
        order = np.lexsort((keys, -self._last[keys], -self._score[keys]))
        return keys[order[:count]]

    def _lowest(self, keys: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return the `count` least valuable keys, ascending: the reverse order of `_highest`."""
        if count <= 0:
            return keys[:0]
        if count < len(keys):
            score = self._score[keys]
            keys = keys[score <= np.partition(score, count - 1)[count - 1]]
        order = np.lexsort((-keys, self._last[keys], self._score[keys]))
        return keys[order[:count]]

    def _flat(self, wanted: NDArray[np.bool_]) -> NDArray[np.bool_]:
        shape = (self.layers, self.experts)
        if wanted.shape != shape or wanted.dtype != np.bool_:
            raise ValueError(f"wanted must be bool {shape}, got {wanted.dtype} {wanted.shape}")
        return wanted.reshape(-1)

    def _indices(self, keys: Iterable[Key]) -> NDArray[np.int64]:
        """Return distinct keys as indices of the flat tables, in their order."""
        found = list(dict.fromkeys(keys))
        pairs = np.array(found, np.int64).reshape(-1, 2)
        outside = (pairs < 0) | (pairs >= (self.layers, self.experts))
        for index in np.flatnonzero(outside.any(1)).tolist():
            raise ValueError(
                f"keys must be below ({self.layers}, {self.experts}), got {found[index]}"
            )
        return pairs[:, 0] * self.experts + pairs[:, 1]

    def _keys(self, flat: NDArray[np.int64]) -> list[Key]:
        layers, experts = np.divmod(flat, self.experts)
        return list(zip(layers.tolist(), experts.tolist(), strict=True))

    def _key(self, flat: int) -> Key:
        return divmod(flat, self.experts)
