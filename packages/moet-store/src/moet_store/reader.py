"""Reads rows of packs: many at a time, straight into their destinations, verified.

Submitting, polling and waiting are separate calls, and a row's place in memory is the caller's
choice. Rows are hashed while others arrive, and the kernel is given new reads before each stretch
is hashed. A row without others is two requests, one after the other: most of it first, whose
checksum is computed while the rest is on its way. Rows that somebody waits for go before
prefetches, with the kernel and with the checksum.
"""

import errno
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from moet_core.row import ROW_ALIGNMENT
from moet_store.counters import Counters
from moet_store.direct import PackFile
from moet_store.engines import Engine, EngineName, open_engine
from moet_store.errors import PackError, PackErrorKind
from moet_store.pack import Pack, open_pack
from moet_store.rows import Completion, Key, Row, row_buffer
from moet_store.spec import PackSpec
from moet_store.stripes import Stripes

__all__ = ["Completion", "Key", "PackReader"]

ONE_REQUEST_BYTES = 2**20
"""Up to this length a row alone is one request too: a second would cost more time than it hides."""

REST_SHARE = 4
"""The second request is one in so many of a row's bytes: memory is hashed three to five times as
fast as drives of 2 GB/s deliver."""

HASH_BYTES = 2**21
"""Hashed at once, so that the next read never waits longer than that takes."""

DEFAULT_BYTES = 2**25
DEFAULT_DEPTHS = (4, 16)
"""Where no probe has found a better number: rows of `DEFAULT_BYTES`, within these bounds."""

MAX_DEPTH = 128
MAX_ATTEMPTS = 32
"""How often a read is tried again after EAGAIN, EINTR or a short count without an end in sight."""

WAIT_SECONDS = 1.0


class PackReader:
    """Reads the rows of one pack, of its stripes on several drives, or of mirrors of it.

    Args:
        paths: The pack files: one, or every stripe; several files of one stripe are mirrors.
        wanted: What the packs must be; None accepts any, if they belong together.
        engine: "auto", "io_uring" or "pread".
        depth: Rows with the kernel at a time; None takes 32 MiB of them, but 4 to 16.
            `moet_store.probe.tune_depth` finds a number for a drive.
        direct: Read past the page cache where the file system can.
        verify: Check every row against its checksum. Without it damage is served unnoticed.
        partial: Accept that stripes are missing; their rows cannot be read.

    Raises:
        PackError: What is wrong with a file; STRIPES; UNAVAILABLE.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        wanted: PackSpec | None = None,
        engine: EngineName | Engine = "auto",
        depth: int | None = None,
        direct: bool = True,
        verify: bool = True,
        partial: bool = False,
    ) -> None:
        packs = [open_pack(path, wanted) for path in paths]
        self._stripes: Stripes[PackFile] = Stripes(packs, partial=partial)
        self.spec = self._stripes.spec
        self.counters = Counters(self.spec.row_bytes)
        self.verify = verify
        self._first = _first_request(self.spec.row_bytes) if verify else self.spec.row_bytes
        self._engine = (
            open_engine(engine, MAX_DEPTH, self.counters) if isinstance(engine, str) else engine
        )
        self.set_depth(_default_depth(self.spec.row_bytes) if depth is None else depth)
        self._tickets = itertools.count()
        self._rows: dict[int, Row] = {}
        # Rows by ticket that the kernel reads, one request each.
        self._reading: dict[int, Row] = {}
        self._demand: deque[Row] = deque()
        self._prefetch: deque[Row] = deque()
        # Rows of which something has arrived, or failed, that nobody has looked at.
        self._ready: dict[int, Row] = {}
        self._ended: list[Completion] = []
        self._files: list[PackFile] = []
        try:
            for pack in packs:
                self._open(pack, direct)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def engine(self) -> str:
        """The engine at work: "io_uring" or "pread"."""
        return self._engine.name

    @property
    def direct(self) -> bool:
        """Whether every file is read past the page cache."""
        return all(file.direct for file in self._files)

    @property
    def packs(self) -> tuple[Pack, ...]:
        """The packs that are read."""
        return tuple(file.pack for file in self._files)

    @property
    def depth(self) -> int:
        """Rows that may be with the kernel at a time."""
        return self.counters.queue_depth

    def set_depth(self, depth: int) -> None:
        """Change the number of rows that may be with the kernel; its bounds are applied."""
        self.counters.queue_depth = max(1, min(depth, self._engine.entries))

    def register(self, region: memoryview) -> None:
        """Announce memory that holds rows one behind the other and will be read into often."""
        self._engine.register(region, self.spec.row_bytes)

    def digest(self, key: Key) -> int:
        """Return the checksum that a row must have.

        Raises:
            PackError: ROW_MISSING.
        """
        digest = self._having(key)[0].pack.manifest.digest(*key)
        assert digest is not None
        return digest

    def written_keys(self) -> list[Key]:
        """Return the keys of all rows that can be read, in file order."""
        found = {
            (layer, expert)
            for pack in self.packs
            for layer in pack.manifest.written
            for expert in pack.spec.held
        }
        return self.file_order(found)

    def file_order(self, keys: Iterable[Key]) -> list[Key]:
        """Sort keys as their rows lie in the files, all stripes side by side."""
        return sorted(keys, key=lambda key: (key[0], key[1] // len(self._stripes), key[1]))

    def submit(
        self, keys: Sequence[Key], buffers: Sequence[Any], *, prefetch: bool = False
    ) -> list[int]:
        """Start to read rows; returns at once.

        Args:
            keys: Which rows.
            buffers: Where to: for each row, writable memory of row_bytes, page-aligned. It belongs
                to the reader until the row's completion is returned.
            prefetch: Nobody waits for them yet; reads that somebody waits for go first.

        Returns:
            A ticket for each key.

        Raises:
            PackError: ROW_MISSING or BUFFER, before anything is started.
        """
        rows = [
            Row(key, row_buffer(buffer, self.spec.row_bytes, key), self._having(key))
            for key, buffer in zip(keys, buffers, strict=True)
        ]
        for row in rows:
            row.prefetch = prefetch
            row.ticket = next(self._tickets)
            self._rows[row.ticket] = row
            self._enqueue(row)
        self._fill()
        return [row.ticket for row in rows]

    def promote(self, ticket: int) -> None:
        """Let a prefetch go first from now on, because somebody waits for it."""
        row = self._rows.get(ticket)
        if row is not None and row.prefetch:
            row.prefetch = False
            if row in self._prefetch:
                self._prefetch.remove(row)
                self._demand.append(row)

    def poll(self) -> list[Completion]:
        """Return the reads that ended since the last call, without waiting for any."""
        return self._wait_until(lambda: False, 0.0)

    def wait(
        self, tickets: Iterable[int] | None = None, seconds: float | None = None
    ) -> list[Completion]:
        """Wait for reads and return every completion that no call has returned yet.

        Args:
            tickets: Those to wait for; None waits for all.
            seconds: When to return even so.
        """
        awaited = set(self._rows if tickets is None else tickets)
        return self._wait_until(lambda: awaited.isdisjoint(self._rows), seconds)

    def wait_any(self, seconds: float | None = None) -> list[Completion]:
        """Wait until a read ends, and return every completion that no call has returned yet.

        Args:
            seconds: When to return even so.
        """
        return self._wait_until(lambda: bool(self._ended) or not self._rows, seconds)

    def close(self) -> None:
        """Wait for what the kernel holds, drop what it does not, and close the files."""
        self._demand.clear()
        self._prefetch.clear()
        while self._reading:
            self._engine.wait(WAIT_SECONDS)
            for ticket, _ in self._engine.reap():
                del self._reading[ticket]
        self._engine.close()
        for file in self._files:
            file.close()
        self._files.clear()
        self._ready.clear()
        self._rows.clear()

    def _wait_until(self, holds: Callable[[], bool], seconds: float | None) -> list[Completion]:
        deadline = None if seconds is None else time.monotonic() + seconds
        self._take()
        while not holds():
            left = WAIT_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                self._advance()
                break
            if self._ready:
                self._check(min(self._ready.values(), key=lambda row: row.prefetch))
            else:
                self._engine.wait(min(left, WAIT_SECONDS))
                self._take()
        ended, self._ended = self._ended, []
        return ended

    def _open(self, pack: Pack, direct: bool) -> None:
        file = PackFile(pack, direct, self.counters)
        self._files.append(file)
        self._stripes.add(pack.spec.stripe, file)
        self._engine.add_file(file.fd)

    def _having(self, key: Key) -> list[PackFile]:
        """Return the files in which a row is written."""
        files = self._stripes.of(key)
        written = [file for file in files if file.pack.manifest.digest(*key) is not None]
        if not written:
            raise PackError(
                PackErrorKind.ROW_MISSING,
                files[0].pack.path,
                wanted="a layer that is written",
                found="one that is not",
                advice="Resume writing the pack.",
                layer=key[0],
                expert=key[1],
            )
        return written

    def _enqueue(self, row: Row) -> None:
        # Of mirrors the one with the least to do.
        row.files.sort(key=lambda file: file.load)
        row.files[0].load += 1
        row.restart()
        self._queue(row).append(row)

    def _queue(self, row: Row) -> deque[Row]:
        return self._prefetch if row.prefetch else self._demand

    def _fill(self) -> None:
        """Give the kernel as many rows as it may have, those that somebody waits for first."""
        free = self.depth - len(self._reading)
        now = time.perf_counter()
        while free > 0 and (self._demand or self._prefetch):
            row = (self._demand or self._prefetch).popleft()
            if row.started is None:
                row.started = now
            # Beside others it is hashed while they arrive.
            alone = len(self._rows) == 1
            row.stop = self._first if alone and row.arrived < self._first else self.spec.row_bytes
            self._reading[row.ticket] = row
            file = row.files[0]
            place = file.pack.spec.offset(*row.key) + row.arrived
            self._engine.start(row.ticket, file.fd, row.buffer[row.arrived : row.stop], place)
            free -= 1
        self._engine.submit()
        self.counters.in_flight = len(self._reading)
        self.counters.queued = len(self._demand) + len(self._prefetch)

    def _advance(self) -> None:
        """Check what has arrived, rows that somebody waits for first."""
        for row in sorted(self._ready.values(), key=lambda row: row.prefetch):
            while row.ticket in self._ready:
                self._check(row)

    def _take(self) -> None:
        """Take what has arrived, and keep the kernel busy."""
        for ticket, result in self._engine.reap():
            row = self._reading.pop(ticket)
            self._settle(row, result)
            if row.error is not None or row.hashed < row.arrived:
                self._ready[ticket] = row
        self._fill()

    def _check(self, row: Row) -> None:
        """Take the checksum of a row one stretch further, and end the row if it has ended.

        One stretch, and then the kernel again: no more than that ever delays the next read.
        """
        if row.error is None:
            row.hash_stretch(HASH_BYTES, self.verify)
        if row.error is not None or row.hashed == row.arrived:
            del self._ready[row.ticket]
            if row.error is not None or row.hashed == self.spec.row_bytes:
                self._finish(row)
        self._take()

    def _settle(self, row: Row, result: int) -> None:
        """Decide what the kernel's answer means for a row."""
        file = row.files[0]
        if result > 0:
            arrived = row.arrived + result
            if arrived < row.stop and file.direct:
                # The rest must begin on a sector again; less than one is no progress.
                arrived = arrived // ROW_ALIGNMENT * ROW_ALIGNMENT
            if arrived > row.arrived:
                row.attempts = 0
            row.arrived = arrived
            if arrived < row.stop:
                self._again(row, PackErrorKind.ROW_SHORT, f"{row.stop - arrived} bytes fewer")
            elif arrived < self.spec.row_bytes:
                # Before rows that have not begun: this one is nearly there.
                self._queue(row).appendleft(row)
        elif result == 0:
            found = f"the file's end {row.arrived} bytes into the row"
            self._fail(row, PackErrorKind.ROW_SHORT, found)
        elif -result in (errno.EAGAIN, errno.EINTR):
            self._again(row, PackErrorKind.IO, os.strerror(-result))
        elif -result in (errno.EINVAL, errno.EOPNOTSUPP) and file.can_fall_back:
            file.fall_back(os.strerror(-result))
            self._queue(row).appendleft(row)
        else:
            self._fail(row, PackErrorKind.IO, os.strerror(-result))

    def _again(self, row: Row, kind: PackErrorKind, found: str) -> None:
        self.counters.retries += 1
        row.attempts += 1
        if row.attempts > MAX_ATTEMPTS:
            self._fail(row, kind, f"{found}, {row.attempts} times")
        else:
            self._queue(row).appendleft(row)

    def _fail(self, row: Row, kind: PackErrorKind, found: str) -> None:
        self.counters.io_errors += 1
        advice = "See the kernel's log; moet pack verify names every bad row."
        row.error = row.failure(kind, f"{self.spec.row_bytes} bytes", found, advice)

    def _finish(self, row: Row) -> None:
        """End a row that is whole or has failed; a mirror that was not tried is tried first."""
        if row.error is None and self.verify and not row.matches():
            self.counters.checksum_errors += 1
        row.files.pop(0).load -= 1
        if row.error is not None and row.files:
            self._enqueue(row)
            return
        del self._rows[row.ticket]
        if row.error is None:
            assert row.started is not None
            self.counters.rows_read += 1
            self.counters.latencies.append(time.perf_counter() - row.started)
        self._ended.append(Completion(row.ticket, row.key, row.error))


def _first_request(row_bytes: int) -> int:
    """Return how much of a row alone its first request reads; the second reads the rest."""
    if row_bytes <= ONE_REQUEST_BYTES:
        return row_bytes
    return row_bytes - row_bytes // REST_SHARE // ROW_ALIGNMENT * ROW_ALIGNMENT


def _default_depth(row_bytes: int) -> int:
    least, most = DEFAULT_DEPTHS
    return max(least, min(most, DEFAULT_BYTES // row_bytes))
