"""Rows by key: from memory if they are there, else from disk into memory, without blocking."""

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moet_store.arena import Arena
from moet_store.counters import Snapshot
from moet_store.errors import PackError, PackErrorKind
from moet_store.heat import load_heat, save_heat
from moet_store.manifest import row_digest
from moet_store.reader import PackReader
from moet_store.rows import Completion, Key

__all__ = ["ExpertStore"]


class ExpertStore:
    """An arena over a reader; one thread owns both.

    Args:
        reader: Where rows come from; the store closes it.
        slots: Rows that the arena holds.
        pin: Called once with the arena's memory, to lock it for a device.
    """

    def __init__(
        self,
        reader: PackReader,
        slots: int,
        pin: Callable[[memoryview], object] | None = None,
    ) -> None:
        self.reader = reader
        self.arena = Arena(slots, reader.spec.row_bytes, pin)
        reader.register(self.arena.region)
        self._counters = reader.counters
        self._slots: dict[int, int] = {}
        self._tickets: dict[Key, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def begin_step(self) -> None:
        """End the current step; see `moet_store.arena`."""
        self.arena.begin_step()

    def get(self, key: Key) -> NDArray[np.uint8] | None:
        """Return a row as a read-only view uint8 [row_bytes], valid until the step ends.

        Returns None if the row is not in memory; `submit` fetches it.
        """
        view = self.arena.get(key)
        if view is None:
            self._counters.misses += 1
        else:
            self._counters.hits += 1
        return view

    def is_coming(self, key: Key) -> bool:
        """Tell whether a row is on its way; `poll` and `wait` publish what has arrived."""
        return key in self._tickets

    def tickets(self, keys: Iterable[Key]) -> list[int]:
        """Return the tickets of those rows that are on their way."""
        return [self._tickets[key] for key in keys if key in self._tickets]

    def submit(self, keys: Sequence[Key], *, prefetch: bool = False) -> list[int]:
        """Start to fetch rows that `get` did not find; returns at once.

        Rows that are in memory need no ticket and get none. A row that is already on its way keeps
        its ticket; if it was a prefetch and is wanted now, it goes first from now on.

        Args:
            keys: Which rows.
            prefetch: Nobody waits for them yet: they use free slots only, never evict, and are
                left out where no slot is free.

        Returns:
            The tickets of the rows that are on their way.

        Raises:
            PackError: ARENA_FULL, with nothing evicted for the rows that had no room; ROW_MISSING.
        """
        tickets = []
        for key in dict.fromkeys(keys):
            if key in self.arena:
                continue
            ticket = self._tickets.get(key)
            if ticket is None:
                ticket = self._start(key, prefetch)
            elif not prefetch:
                self.reader.promote(ticket)
            if ticket is not None:
                tickets.append(ticket)
        return tickets

    def poll(self) -> list[Completion]:
        """Publish what has arrived and return it, without waiting."""
        return self._publish(self.reader.poll())

    def wait(
        self, tickets: Iterable[int] | None = None, seconds: float | None = None
    ) -> list[Completion]:
        """Wait for rows, publish what has arrived and return it.

        Args:
            tickets: Those to wait for; None waits for all.
            seconds: When to return even so.
        """
        return self._publish(self.reader.wait(tickets, seconds))

    def preload(self) -> list[int]:
        """Start to fetch the rows that were hot when the heat was saved, in file order.

        Raises:
            PackError: HEAT, see `moet_store.heat.load_heat`.
        """
        spec = self.reader.spec
        keys = load_heat(self.reader.packs[0], spec.experts)[: self.arena.slots]
        return self.submit(self.reader.file_order(keys), prefetch=True)

    def save_heat(self) -> None:
        """Keep the keys of the rows in memory, hottest first, for the next start.

        Raises:
            PackError: NO_SPACE or IO.
        """
        save_heat(self.reader.packs[0], self.arena.hottest())

    def counters(self) -> Snapshot:
        """Return what was counted."""
        self._counters.evictions = self.arena.evictions
        return self._counters.snapshot()

    def check_integrity(self) -> None:
        """Check the arena's tables, and the bytes of every row in it against the pack's checksums.

        Raises:
            PackError: ARENA_BROKEN, with layer and expert where a row's bytes differ.
        """
        self.arena.check_tables()
        for key in self.arena:
            slot = self.arena.slot_of(key)
            assert slot is not None
            row = self.arena.region[slot * self.arena.row_bytes :][: self.arena.row_bytes]
            wanted, found = self.reader.digest(key), row_digest(row, *key)
            if wanted != found:
                raise PackError(
                    PackErrorKind.ARENA_BROKEN,
                    None,
                    wanted=f"checksum {wanted:016x} in slot {slot}",
                    found=f"{found:016x}",
                    advice="Something wrote into the arena, or the memory is damaged.",
                    layer=key[0],
                    expert=key[1],
                )

    def close(self) -> None:
        """Wait for reads that the kernel holds and close the files; the arena stays readable."""
        self.reader.close()

    def _start(self, key: Key, prefetch: bool) -> int | None:
        slot = self.arena.claim(key, evict=not prefetch)
        if slot is None:
            if prefetch:
                return None
            layer, expert = key
            raise PackError(
                PackErrorKind.ARENA_FULL,
                None,
                wanted="a slot without a row of this step",
                found=f"none among {self.arena.slots}",
                advice="Make the arena larger, or call begin_step between steps.",
                layer=layer,
                expert=expert,
            )
        try:
            (ticket,) = self.reader.submit([key], [self.arena.destination(slot)], prefetch=prefetch)
        except BaseException:
            self.arena.abandon(slot)
            raise
        self._slots[ticket] = slot
        self._tickets[key] = ticket
        return ticket

    def _publish(self, ended: list[Completion]) -> list[Completion]:
        for completion in ended:
            slot = self._slots.pop(completion.ticket, None)
            if slot is None:
                continue
            del self._tickets[completion.key]
            if completion.error is None:
                self.arena.publish(slot)
            else:
                self.arena.abandon(slot)
        return ended
