"""Host memory that holds rows: a fixed number of slots, filled, looked up and reused.

A step is what the caller computes between two calls of `begin_step`. Rows that a step used or
received stay until it ends: views given out stay valid, and copies from them may run until then.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from moet_store.errors import PackError, PackErrorKind
from moet_store.memory import aligned_buffer
from moet_store.rows import Key

__all__ = ["Arena"]

HALF_LIFE = 256.0
"""Steps after which a use counts half: expert use is local in time, static favourites are weak."""

Bytes = NDArray[np.uint8]


class Arena:
    """Slots of one row each, in one page-aligned region.

    Args:
        slots: How many rows fit.
        row_bytes: Length of a row, a multiple of 4096.
        pin: Called once with the region, to lock it for a device; None leaves it plain memory.
    """

    def __init__(
        self, slots: int, row_bytes: int, pin: Callable[[memoryview], object] | None = None
    ) -> None:
        if slots < 1:
            raise _broken("one slot at least", f"{slots}")
        self.slots = slots
        self.row_bytes = row_bytes
        self.region = aligned_buffer(slots * row_bytes)
        if pin is not None:
            pin(self.region)
        self.step = 1
        self.evictions = 0
        rows = np.frombuffer(self.region, dtype=np.uint8).reshape(slots, row_bytes)
        self._writable = [
            self.region[at : at + row_bytes] for at in range(0, slots * row_bytes, row_bytes)
        ]
        rows.flags.writeable = False
        self._views: list[Bytes] = list(rows)
        self._slot_of: dict[Key, int] = {}
        self._key_of: list[Key | None] = [None] * slots
        self._free = list(range(slots - 1, -1, -1))
        self._filling: dict[int, Key] = {}
        # Uses, decayed as of the step of the last one. A hit only notes its slot in `_touched`;
        # the arrays follow when a step ends or somebody needs them.
        self._uses = np.zeros(slots)
        self._last = np.zeros(slots, dtype=np.int64)
        self._stamp = [0] * slots
        self._touched: list[int] = []

    def __len__(self) -> int:
        """Number of rows that can be looked up."""
        return len(self._slot_of)

    def __contains__(self, key: Key) -> bool:
        return key in self._slot_of

    def __iter__(self) -> Iterator[Key]:
        return iter(self._slot_of)

    def begin_step(self) -> None:
        """End the current step: views given out by now may change from here on."""
        self._fold()
        self.step += 1

    def get(self, key: Key) -> Bytes | None:
        """Return a row as a read-only view uint8 [row_bytes] of its slot, None if it is absent.

        The view stays valid until the step ends. No system call, no copy.
        """
        slot = self._slot_of.get(key)
        if slot is None:
            return None
        if self._stamp[slot] != self.step:
            self._stamp[slot] = self.step
            self._touched.append(slot)
        return self._views[slot]

    def slot_of(self, key: Key) -> int | None:
        """Return the slot of a row, None if it is absent; counts as no use."""
        return self._slot_of.get(key)

    def memory(self, slot: int) -> memoryview:
        """Return the memory of a slot, for copies that want a plain buffer; it is not to change."""
        return self._writable[slot]

    @property
    def room(self) -> int:
        """How many slots `claim` can give out before the step ends."""
        self._fold()
        used = np.count_nonzero(self._last == self.step)
        return len(self._free) + len(self._slot_of) - int(used)

    def claim(self, key: Key, *, evict: bool) -> int | None:
        """Take a slot to read a row into; nobody can look it up until it is published.

        Args:
            key: The row, neither present nor being filled.
            evict: Take the slot of the least valuable row if none is free. Rows of the current
                step are never taken.

        Returns:
            The slot, or None if there is none.
        """
        if key in self._slot_of:
            raise _broken("a row that is absent", f"{key} in slot {self._slot_of[key]}")
        slot = self._free.pop() if self._free else self._evict() if evict else None
        if slot is not None:
            self._filling[slot] = key
        return slot

    def destination(self, slot: int) -> memoryview:
        """Return the memory of a slot that was claimed."""
        if slot not in self._filling:
            raise _broken("a slot that was claimed", f"slot {slot}")
        return self._writable[slot]

    def publish(self, slot: int) -> None:
        """Let a row be found: its bytes are all there and verified."""
        key = self._filling.pop(slot)
        self._slot_of[key] = slot
        self._key_of[slot] = key
        self._uses[slot] = 0.0
        self._stamp[slot] = self.step
        self._touched.append(slot)

    def abandon(self, slot: int) -> None:
        """Free a slot whose row could not be read."""
        del self._filling[slot]
        self._free.append(slot)

    def hottest(self) -> list[Key]:
        """Return the rows that can be found, the most valuable first."""
        uses = self._decayed().tolist()
        order = sorted(
            self._slot_of.items(), key=lambda item: (-uses[item[1]], -self._last[item[1]], item[0])
        )
        return [key for key, _ in order]

    def check_tables(self) -> None:
        """Check that every slot is free, being filled or one row's, and that the tables agree.

        Raises:
            PackError: ARENA_BROKEN.
        """
        owners = [*self._free, *self._filling, *self._slot_of.values()]
        if sorted(owners) != list(range(self.slots)):
            raise _broken("every slot once among free, filling and found", f"{sorted(owners)}")
        held = {key: slot for slot, key in enumerate(self._key_of) if key is not None}
        if held != self._slot_of:
            raise _broken("one owner for every slot", f"{held} against {self._slot_of}")
        if set(self._filling.values()) & set(self._slot_of):
            raise _broken("rows that are found or being filled", "a row that is both")

    def _fold(self) -> None:
        """Count the uses of this step; each row is used once a step at most."""
        slots = self._touched
        age = self.step - self._last[slots]
        self._uses[slots] = self._uses[slots] * 0.5 ** (age / HALF_LIFE) + 1.0
        self._last[slots] = self.step
        slots.clear()

    def _decayed(self) -> NDArray[np.float64]:
        self._fold()
        return self._uses * 0.5 ** ((self.step - self._last) / HALF_LIFE)

    def _evict(self) -> int | None:
        """Free the slot whose row is used least, the one not used for longest among equals."""
        uses = self._decayed()
        evictable = self._last < self.step
        evictable[list(self._filling)] = False
        if not evictable.any():
            return None
        # Decay between two steps is far above rounding, so that recency only breaks real ties.
        value = np.where(evictable, uses, np.inf)
        tied = np.flatnonzero(value == value.min())
        slot = int(tied[np.argmin(self._last[tied])])
        key = self._key_of[slot]
        if key is None:
            raise _broken("a row in every slot that is not free", f"none in slot {slot}")
        del self._slot_of[key]
        self._key_of[slot] = None
        self.evictions += 1
        return slot


def _broken(wanted: str, found: str) -> PackError:
    advice = "Please report it."
    return PackError(PackErrorKind.ARENA_BROKEN, None, wanted=wanted, found=found, advice=advice)
