"""Where rows wait on the host: all of them in memory, or in packs behind an arena.

A store hands rows out by calling `place(key, row)`, which starts a copy and returns its number; the
row's memory is reused once that copy is done. One thread owns a store.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

from moet_store import Completion, ExpertStore, PackError, PackReader, Snapshot
from moet_store.manifest import row_digest
from moet_store.memory import aligned_buffer
from moet_store.rows import Key

__all__ = ["CopyState", "HostStore", "PackStore", "Pin", "PinnedStore", "Place", "RowState"]

Place = Callable[[Key, memoryview], int]
Pin = Callable[[memoryview], Callable[[], object]]
RowState = Literal["absent", "coming", "ready"]


class CopyState(Protocol):
    """What a store asks about the copies out of its memory; `copies.Copies` answers."""

    def done(self) -> int:
        """Return how many are known to be done, in the order of their numbers; never waits."""

    def wait(self) -> None:
        """Wait until all are done."""


class HostStore(Protocol):
    """What the resident experts need of a store; keys are (model layer, expert)."""

    @property
    def description(self) -> str:
        """Say for people where rows wait."""

    @property
    def host_bytes(self) -> int:
        """Host memory that the store holds."""

    def attach(self, copies: CopyState) -> None:
        """Tell which copies `place` starts; once, before rows are brought."""

    def begin_step(self) -> None:
        """End the former step: the memory of its rows may be reused as their copies end."""

    def bring(self, keys: Sequence[Key], place: Place, *, scan: bool) -> None:
        """Hand out every row, verified, in whatever order they arrive; waits for reads.

        Args:
            keys: Which rows.
            place: Called once for each.
            scan: The rows are used once and must not push others out of the arena.

        Raises:
            PackError: A row could not be read; the other rows were still placed.
        """

    @property
    def reads(self) -> bool:
        """Whether rows may have to be read from a drive."""

    def read_ahead(self, keys: Iterable[Key]) -> None:
        """Start to read rows that nobody waits for, as far as there is room for them."""

    def start(self, keys: Sequence[Key]) -> None:
        """Start to read rows that `bring` will soon be called with, as far as there is room."""

    def states(self, keys: Sequence[Key]) -> list[RowState]:
        """Say of each row whether `bring` would have to wait for it; never waits."""

    def matches(self, key: Key, row: memoryview) -> bool:
        """Compare a copy of a row with the store's own bytes or checksum."""

    def counters(self) -> Snapshot | None:
        """Return what was counted; None where nothing is read."""

    def close(self) -> None:
        """Release files and memory."""


class PinnedStore:
    """Every row in one region of memory.

    Args:
        layers: Model indices of the layers.
        experts: Experts of a layer.
        row_bytes: Length of a row.
        pin: Called once with the region, to lock it for a device; returns what unlocks it.
    """

    def __init__(
        self,
        layers: Sequence[int],
        experts: int,
        row_bytes: int,
        pin: Pin | None = None,
    ) -> None:
        self.row_bytes = row_bytes
        self.experts = experts
        self._first = {layer: number * experts for number, layer in enumerate(layers)}
        self._region = aligned_buffer(len(layers) * experts * row_bytes)
        self._unpin = None if pin is None else pin(self._region)

    def row(self, key: Key) -> memoryview:
        """Return the memory of a row."""
        start = (self._first[key[0]] + key[1]) * self.row_bytes
        return self._region[start : start + self.row_bytes]

    @property
    def description(self) -> str:
        """Say for people where rows wait."""
        return f"memory ({self.host_bytes / 2**30:.2f} GiB)"

    @property
    def host_bytes(self) -> int:
        """Host memory that the store holds."""
        return len(self._region)

    def attach(self, copies: CopyState) -> None:
        """Do nothing: no memory is reused."""

    def begin_step(self) -> None:
        """Do nothing: rows never move."""

    def bring(self, keys: Sequence[Key], place: Place, *, scan: bool) -> None:
        """Hand out every row at once."""
        for key in keys:
            place(key, self.row(key))

    @property
    def reads(self) -> bool:
        """False."""
        return False

    def read_ahead(self, keys: Iterable[Key]) -> None:
        """Do nothing: every row is there."""

    def start(self, keys: Sequence[Key]) -> None:
        """Do nothing: every row is there."""

    def states(self, keys: Sequence[Key]) -> list[RowState]:
        """Return "ready" for each."""
        return ["ready"] * len(keys)

    def matches(self, key: Key, row: memoryview) -> bool:
        """Compare all bytes."""
        return self.row(key) == row

    def counters(self) -> Snapshot | None:
        """Return None: nothing is read."""
        return None

    def close(self) -> None:
        """Unlock the memory, which goes with the object."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None


class PackStore:
    """Rows in packs, behind an arena if there is one.

    Rows that are used once, and all rows where there is no arena, go through a few staging
    buffers instead, so that a long prompt pushes nothing out of the arena.

    Args:
        reader: Where rows come from; the store closes it.
        staging: Number of staging buffers, 2 at least.
        arena_rows: Rows that the arena holds; 0 for no arena.
        pin: Called with each region of memory, to lock it for a device; returns what unlocks it.
    """

    def __init__(
        self,
        reader: PackReader,
        *,
        staging: int,
        arena_rows: int = 0,
        pin: Pin | None = None,
    ) -> None:
        if staging < 2:
            raise ValueError(f"a store needs 2 staging buffers at least, got {staging}")
        self.reader = reader
        self.row_bytes = reader.spec.row_bytes
        # The reader knows one region of long-lived memory: the arena if there is one.
        self._pin, self._unpin = pin, list[Callable[[], object]]()
        self._arena = ExpertStore(reader, arena_rows, self._lock) if arena_rows else None
        region = aligned_buffer(staging * self.row_bytes)
        self._lock(region)
        if self._arena is None:
            reader.register(region)
        cuts = range(0, staging * self.row_bytes, self.row_bytes)
        self._buffers = [region[at : at + self.row_bytes] for at in cuts]
        self._free = list(range(staging))
        self._kept = max(1, staging // 4)  # buffers that reading ahead leaves alone
        self._coming: dict[int, tuple[Key, int]] = {}  # ticket: key and buffer
        self._staged: dict[Key, int] = {}
        self._used: deque[tuple[int, int]] = deque()  # copies by number, and their buffers
        self._last_of_arena = 0  # number of the last copy out of the arena
        self._copies: CopyState

    @property
    def description(self) -> str:
        """Say for people where rows wait."""
        reads = f"packs ({self.reader.engine}, {'direct' if self.reader.direct else 'cached'})"
        if self._arena is None:
            return reads
        arena = self._arena.arena
        return f"an arena of {arena.slots * arena.row_bytes / 2**30:.2f} GiB over {reads}"

    @property
    def host_bytes(self) -> int:
        """Host memory that the store holds."""
        arena = self._arena.arena.slots if self._arena is not None else 0
        return (len(self._buffers) + arena) * self.row_bytes

    def attach(self, copies: CopyState) -> None:
        """Tell which copies `place` starts."""
        self._copies = copies

    def begin_step(self) -> None:
        """Take what has arrived; rows that were read ahead in vain stay while there is room."""
        # A promotion may still be on its way out of the arena: its slot keeps its row until then.
        if self._arena is not None and self._copies.done() >= self._last_of_arena:
            self._arena.begin_step()
        self._collect(self._poll())
        self._reclaim()

    def bring(self, keys: Sequence[Key], place: Place, *, scan: bool) -> None:
        """Hand out every row: from the arena, from staging, or read."""
        wanted = dict.fromkeys(keys)
        missing = [key for key in wanted if not self._hand_out(key, place, counted=True)]
        staged = scan or self._arena is None
        failures: list[PackError] = []
        while missing:
            # Waiting for others may have brought rows that were read ahead.
            missing = [key for key in missing if not self._hand_out(key, place, counted=False)]
            batch = self._stage(missing) if staged else self._submit(missing)
            missing = missing[len(batch) :]
            failures += self._wait(batch)
            for key in batch:
                if not self._hand_out(key, place, counted=False) and not failures:
                    raise RuntimeError(f"row {key} was read and is nowhere to be found")
        if failures:
            raise failures[0]

    def read_ahead(self, keys: Iterable[Key]) -> None:
        """Start to read rows into the arena's free slots, or into free staging buffers.

        A quarter of the buffers stays free for rows that somebody waits for.
        """
        candidates = list(keys)
        states = self.states(candidates)
        wanted = [k for k, state in zip(candidates, states, strict=True) if state == "absent"]
        if self._arena is not None:
            self._arena.submit(wanted, prefetch=True)
            wanted = [key for key in wanted if not self._in_arena_or_coming(key)]
        if wanted:
            self._reclaim()
        for key in wanted[: max(0, len(self._free) - self._kept)]:
            self._start(key, prefetch=True)

    @property
    def reads(self) -> bool:
        """True."""
        return True

    def start(self, keys: Sequence[Key]) -> None:
        """Start to read rows into the arena, or into free staging buffers; never waits.

        Rows that were started before are taken a step further.
        """
        self._collect(self._poll())
        wanted = [key for key in keys if self._state(key) == "absent"]
        if not wanted:
            return
        if self._arena is not None:
            self._arena.submit(wanted[: self._arena.arena.room])
            return
        self._reclaim()
        for key in wanted[: max(0, len(self._free) - self._kept)]:
            self._start(key, prefetch=False)

    def states(self, keys: Sequence[Key]) -> list[RowState]:
        """Look for rows in the arena and in staging."""
        found = [self._state(key) for key in keys]
        if "coming" in found:
            self._collect(self._poll())
            found = [self._state(key) for key in keys]
        return found

    def matches(self, key: Key, row: memoryview) -> bool:
        """Compare checksums."""
        return row_digest(row, *key) == self.reader.digest(key)

    def counters(self) -> Snapshot | None:
        """Return the reader's and the arena's counters."""
        return self._arena.counters() if self._arena else self.reader.counters.snapshot()

    def check_integrity(self) -> None:
        """Check the arena, and that every staging buffer has one use.

        Raises:
            PackError: ARENA_BROKEN.
            RuntimeError: The staging buffers' tables disagree.
        """
        if self._arena is not None:
            self._arena.check_integrity()
        coming = [buffer for _, buffer in self._coming.values()]
        used = [buffer for _, buffer in self._used]
        uses = sorted([*self._free, *used, *coming, *self._staged.values()])
        if uses != list(range(len(self._buffers))):
            raise RuntimeError(
                f"wanted one use of each of {len(self._buffers)} buffers, got {uses}"
            )
        for key, buffer in self._staged.items():
            if not self.matches(key, self._buffers[buffer]):
                raise RuntimeError(f"staging buffer {buffer} does not hold row {key}")

    def close(self) -> None:
        """Close the packs and unlock the memory."""
        self.reader.close()
        while self._unpin:
            self._unpin.pop()()

    def _lock(self, region: memoryview) -> None:
        if self._pin is not None:
            self._unpin.append(self._pin(region))

    def _state(self, key: Key) -> RowState:
        if key in self._staged or (self._arena is not None and key in self._arena.arena):
            return "ready"
        return "coming" if self._in_arena_or_coming(key) else "absent"

    def _in_arena_or_coming(self, key: Key) -> bool:
        if self._arena is not None and (key in self._arena.arena or self._arena.is_coming(key)):
            return True
        return any(key == coming for coming, _ in self._coming.values())

    def _hand_out(self, key: Key, place: Place, *, counted: bool) -> bool:
        """Place a row that is in memory; a staged one is used up by that."""
        buffer = self._staged.pop(key, None)
        if buffer is not None:
            self._used.append((place(key, self._buffers[buffer]), buffer))
            return True
        if self._arena is None:
            return False
        view = self._arena.get(key) if counted else self._arena.arena.get(key)
        slot = self._arena.arena.slot_of(key)
        if view is None or slot is None:
            return False
        self._last_of_arena = place(key, self._arena.arena.memory(slot))
        return True

    def _submit(self, keys: Sequence[Key]) -> Sequence[Key]:
        """Start to read as many rows into the arena as it takes at a time."""
        assert self._arena is not None
        if not self._arena.arena.room:
            # This step has used every slot: what it placed must be copied before they change.
            self._copies.wait()
            self._collect(self._arena.wait())
            self._arena.begin_step()
            return []  # of what has arrived now, nothing may be evicted before it is handed out
        batch = keys[: self._arena.arena.room]
        coming = {key for key, _ in self._coming.values()}
        self._arena.submit([key for key in batch if key not in coming])
        return batch

    def _stage(self, keys: Sequence[Key]) -> Sequence[Key]:
        """Start to read as many rows into staging buffers as there are."""
        coming = {key for key, _ in self._coming.values()}
        started = 0
        for key in keys:
            if key not in coming:
                if not self._free:
                    self._make_room(set(keys))
                if not self._free:
                    break
                self._start(key, prefetch=False)
            started += 1
        return keys[:started]

    def _make_room(self, wanted: set[Key]) -> None:
        """Free the buffers that were placed, and else those read ahead in vain."""
        if self._used:
            self._reclaim()
            if not self._free:
                self._copies.wait()
                self._reclaim()
            return
        for key in [key for key in self._staged if key not in wanted]:
            self._free.append(self._staged.pop(key))

    def _reclaim(self) -> None:
        """Free the buffers whose copies are done."""
        done = self._copies.done() if self._used else 0
        while self._used and self._used[0][0] <= done:
            self._free.append(self._used.popleft()[1])

    def _start(self, key: Key, *, prefetch: bool) -> None:
        buffer = self._free.pop()
        try:
            (ticket,) = self.reader.submit([key], [self._buffers[buffer]], prefetch=prefetch)
        except BaseException:
            self._free.append(buffer)
            raise
        self._coming[ticket] = key, buffer

    def _poll(self) -> list[Completion]:
        return self._arena.poll() if self._arena is not None else self.reader.poll()

    def _wait(self, keys: Sequence[Key]) -> list[PackError]:
        """Wait for rows that are on their way and return what went wrong with them."""
        wanted = set(keys)
        tickets = [ticket for ticket, (key, _) in self._coming.items() if key in wanted]
        for ticket in tickets:
            self.reader.promote(ticket)
        if self._arena is not None:
            tickets += self._arena.tickets(keys)
            ended = self._arena.wait(tickets)
        else:
            ended = self.reader.wait(tickets)
        self._collect(ended)
        return [c.error for c in ended if c.error is not None and c.key in wanted]

    def _collect(self, ended: list[Completion]) -> None:
        for completion in ended:
            key, buffer = self._coming.pop(completion.ticket, (None, -1))
            if key is None:
                continue  # the arena has published it
            if completion.error is None:
                self._staged[key] = buffer
            else:
                self._free.append(buffer)
