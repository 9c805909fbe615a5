"""Reads rows of packs: many at a time, straight into their destinations, verified.

Submitting, polling and waiting are separate calls, and a row's place in memory is the caller's
choice. A row is read in pieces: they arrive side by side, and the checksum of the first is computed
while the last is still on its way. The kernel is given new reads before each piece is hashed.
Pieces that somebody waits for go before prefetches, with the kernel and with the checksum.
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

from moet_core.errors import ConfigError
from moet_core.row import ROW_ALIGNMENT
from moet_store.counters import Counters
from moet_store.direct import PackFile
from moet_store.engines import Engine, EngineName, open_engine
from moet_store.errors import PackError, PackErrorKind
from moet_store.pack import Pack, open_pack
from moet_store.rows import Completion, Key, Piece, Row, row_buffer
from moet_store.spec import PackSpec
from moet_store.stripes import Stripes

__all__ = ["DEFAULT_DEPTH", "Completion", "Key", "PackReader"]

PIECE_BYTES = 2**21
"""One read for the kernel: short, so that its checksum hides behind the next one."""

DEFAULT_DEPTH = 16
"""Pieces with the kernel at a time, where no probe has found a better number."""

MAX_DEPTH = 128
MAX_ATTEMPTS = 32
"""How often a piece is tried again after EAGAIN, EINTR or a short count without an end in sight."""

WAIT_SECONDS = 1.0


class PackReader:
    """Reads the rows of one pack, of its stripes on several drives, or of mirrors of it.

    Args:
        paths: The pack files: one, or every stripe; several files of one stripe are mirrors.
        wanted: What the packs must be; None accepts any, if they belong together.
        engine: "auto", "io_uring" or "pread".
        depth: Pieces with the kernel at a time; `moet_store.probe.tune_depth` finds one.
        piece_bytes: Longest read for the kernel, a multiple of 4096; a row is read in as many as it
            takes.
        direct: Read past the page cache where the file system can.
        verify: Check every row against its checksum. Without it damage is served unnoticed.
        partial: Accept that stripes are missing; their rows cannot be read.

    Raises:
        ConfigError: `piece_bytes` is no multiple of 4096.
        PackError: What is wrong with a file; STRIPES; UNAVAILABLE.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        wanted: PackSpec | None = None,
        engine: EngineName | Engine = "auto",
        depth: int = DEFAULT_DEPTH,
        piece_bytes: int = PIECE_BYTES,
        direct: bool = True,
        verify: bool = True,
        partial: bool = False,
    ) -> None:
        if piece_bytes <= 0 or piece_bytes % ROW_ALIGNMENT:
            raise ConfigError(
                f"piece_bytes: wanted a multiple of {ROW_ALIGNMENT}, found {piece_bytes}; leave it "
                f"out for {PIECE_BYTES}."
            )
        packs = [open_pack(path, wanted) for path in paths]
        self._stripes: Stripes[PackFile] = Stripes(packs, partial=partial)
        self.spec = self._stripes.spec
        self.counters = Counters(self.spec.row_bytes)
        self.verify = verify
        self.piece_bytes = piece_bytes
        self._engine = (
            open_engine(engine, MAX_DEPTH, self.counters) if isinstance(engine, str) else engine
        )
        self.set_depth(depth)
        self._tickets = itertools.count()
        self._rows: dict[int, Row] = {}
        self._pieces: dict[int, Piece] = {}
        self._tags = itertools.count()
        self._demand: deque[Piece] = deque()
        self._prefetch: deque[Piece] = deque()
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
        """Pieces that may be with the kernel at a time."""
        return self.counters.queue_depth

    def set_depth(self, depth: int) -> None:
        """Change the number of pieces that may be with the kernel; its bounds are applied."""
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
            self._demand.extend(piece for piece in self._prefetch if piece.row is row)
            self._prefetch = deque(piece for piece in self._prefetch if piece.row is not row)

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
        while self._pieces:
            self._engine.wait(WAIT_SECONDS)
            for tag, _ in self._engine.reap():
                del self._pieces[tag]
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
        row.restart()
        pieces = self._prefetch if row.prefetch else self._demand
        for start in range(0, self.spec.row_bytes, self.piece_bytes):
            pieces.append(Piece(row, start, min(start + self.piece_bytes, self.spec.row_bytes)))
        row.files[0].load += 1

    def _fill(self) -> None:
        """Give the kernel as many pieces as it may have, those that somebody waits for first."""
        free = self.depth - len(self._pieces)
        now = time.perf_counter()
        while free > 0 and (self._demand or self._prefetch):
            piece = (self._demand or self._prefetch).popleft()
            row = piece.row
            if row.error is not None:
                continue
            if row.started is None:
                row.started = now
            row.in_flight += 1
            tag = next(self._tags)
            self._pieces[tag] = piece
            target = row.buffer[piece.at : piece.stop]
            place = piece.file.pack.spec.offset(*row.key) + piece.at
            self._engine.start(tag, piece.file.fd, target, place)
            free -= 1
        self._engine.submit()
        self.counters.in_flight = len(self._pieces)
        self.counters.queued = len(self._demand) + len(self._prefetch)

    def _advance(self) -> None:
        """Check what has arrived, rows that somebody waits for first."""
        for row in sorted(self._ready.values(), key=lambda row: row.prefetch):
            while row.ticket in self._ready:
                self._check(row)

    def _take(self) -> None:
        """Take what has arrived, and keep the kernel busy."""
        for tag, result in self._engine.reap():
            piece = self._pieces.pop(tag)
            piece.row.in_flight -= 1
            self._settle(piece, result)
            self._ready[piece.row.ticket] = piece.row
        self._fill()

    def _check(self, row: Row) -> None:
        """Take the checksum of a row one piece further, and end the row if it has ended.

        One piece, and then the kernel again: no more than that ever delays the next read.
        """
        if row.error is None and row.hashed in row.arrived:
            row.hash_piece(self.verify)
        if row.error is not None or row.hashed not in row.arrived:
            del self._ready[row.ticket]
            self._finish(row)
        self._take()

    def _settle(self, piece: Piece, result: int) -> None:
        """Decide what the kernel's answer means for a piece."""
        row, begin, before = piece.row, piece.at, piece.attempts
        if result > 0:
            piece.at += result
            if piece.at >= piece.stop:
                row.arrived[piece.start] = piece.stop
                return
            piece.attempts = 0
            if piece.file.direct:
                # The rest must begin on a sector again; less than one is no progress.
                piece.at = piece.at // ROW_ALIGNMENT * ROW_ALIGNMENT
                piece.attempts = before if piece.at == begin else 0
            self._again(piece, PackErrorKind.ROW_SHORT, f"{piece.stop - piece.at} bytes fewer")
        elif result == 0:
            found = f"the file's end {piece.at} bytes into the row"
            self._fail(piece, PackErrorKind.ROW_SHORT, found)
        elif -result in (errno.EAGAIN, errno.EINTR):
            self._again(piece, PackErrorKind.IO, os.strerror(-result))
        elif -result in (errno.EINVAL, errno.EOPNOTSUPP) and piece.file.can_fall_back:
            piece.file.fall_back(os.strerror(-result))
            self._requeue(piece)
        else:
            self._fail(piece, PackErrorKind.IO, os.strerror(-result))

    def _again(self, piece: Piece, kind: PackErrorKind, found: str) -> None:
        self.counters.retries += 1
        piece.attempts += 1
        if piece.attempts > MAX_ATTEMPTS:
            self._fail(piece, kind, f"{found}, {piece.attempts} times")
        else:
            self._requeue(piece)

    def _requeue(self, piece: Piece) -> None:
        (self._prefetch if piece.row.prefetch else self._demand).appendleft(piece)

    def _fail(self, piece: Piece, kind: PackErrorKind, found: str) -> None:
        self.counters.io_errors += 1
        advice = "See the kernel's log; moet pack verify names every bad row."
        wanted = f"{self.spec.row_bytes} bytes"
        piece.row.error = piece.row.error or piece.row.failure(kind, wanted, found, advice)

    def _finish(self, row: Row) -> None:
        """End a row if all of it has arrived and was hashed, or if it failed."""
        if row.error is None:
            if row.hashed < self.spec.row_bytes:
                return
            if self.verify and not row.matches():
                self.counters.checksum_errors += 1
        # The kernel may still write into the buffer of a row that failed.
        if row.in_flight:
            return
        row.files.pop(0).load -= 1
        if row.error is not None and row.files:
            # What is still queued of the row would be read from the file that failed.
            self._demand = deque(piece for piece in self._demand if piece.row is not row)
            self._prefetch = deque(piece for piece in self._prefetch if piece.row is not row)
            self._enqueue(row)
            return
        del self._rows[row.ticket]
        if row.error is None:
            assert row.started is not None
            self.counters.rows_read += 1
            self.counters.latencies.append(time.perf_counter() - row.started)
        self._ended.append(Completion(row.ticket, row.key, row.error))
