"""How reads reach the kernel: io_uring, or a pool of threads where that is refused.

An engine knows file descriptors, buffers and numbers, nothing of packs. It is used by one thread.
"""

import errno
import logging
import os
import queue
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Protocol

from moet_store.counters import Counters
from moet_store.errors import PackError, PackErrorKind

__all__ = ["POOL_THREADS", "Engine", "EngineName", "PoolEngine", "open_engine", "report_fallback"]

EngineName = Literal["auto", "io_uring", "pread"]

POOL_THREADS = 8

log = logging.getLogger("moet_store")


class Engine(Protocol):
    """Reads into buffers, many at a time.

    Attributes:
        name: "io_uring" or "pread".
        entries: Reads that may be under way at a time.
    """

    name: str
    entries: int

    def add_file(self, fd: int) -> None:
        """Announce a file that will be read often."""

    def register(self, region: memoryview, row_bytes: int) -> None:
        """Announce memory that will be read into often, in rows from its start."""

    def start(self, tag: int, fd: int, buffer: memoryview, offset: int) -> None:
        """Queue one read; the caller keeps `buffer` alive and keeps to `entries`."""

    def submit(self) -> None:
        """Hand queued reads to the kernel, without waiting for any."""

    def reap(self) -> list[tuple[int, int]]:
        """Return the tag and the byte count, or minus errno, of reads that ended since."""

    def wait(self, seconds: float) -> None:
        """Sleep until a read ends, `seconds` at most."""

    def close(self) -> None:
        """Free what the engine holds; no read may be under way."""


class PoolEngine:
    """Reads with preadv on threads, which do nothing else."""

    name = "pread"

    def __init__(
        self,
        entries: int = POOL_THREADS,
        preadv: Callable[[int, list[memoryview], int], int] = os.preadv,
    ) -> None:
        self.entries = entries
        self._preadv = preadv
        self._pool = ThreadPoolExecutor(entries, thread_name_prefix="moet-read")
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._first: list[tuple[int, int]] = []

    def add_file(self, fd: int) -> None:
        """Do nothing: threads need no announcement."""

    def register(self, region: memoryview, row_bytes: int) -> None:
        """Do nothing: threads need no announcement."""

    def start(self, tag: int, fd: int, buffer: memoryview, offset: int) -> None:
        """See `Engine`; a thread takes it at once."""
        self._pool.submit(self._read, tag, fd, buffer, offset)

    def submit(self) -> None:
        """Do nothing: reads were handed over when they were started."""

    def reap(self) -> list[tuple[int, int]]:
        """See `Engine`."""
        ended, self._first = self._first, []
        while True:
            try:
                ended.append(self._ended.get_nowait())
            except queue.Empty:
                return ended

    def wait(self, seconds: float) -> None:
        """See `Engine`."""
        if not self._first:
            try:
                self._first.append(self._ended.get(timeout=seconds))
            except queue.Empty:
                return

    def close(self) -> None:
        """See `Engine`."""
        self._pool.shutdown()

    def _read(self, tag: int, fd: int, buffer: memoryview, offset: int) -> None:
        try:
            result = self._preadv(fd, [buffer], offset)
        except OSError as error:
            result = -(error.errno or errno.EIO)
        self._ended.put((tag, result))


def report_fallback(counters: Counters, what: str, why: str, advice: str) -> None:
    """Count that a slower way is taken, and say so in one line."""
    counters.fallback_count += 1
    log.warning("%s (%s); %s", what, why, advice)


def open_engine(name: EngineName, entries: int, counters: Counters) -> Engine:
    """Make an engine.

    Args:
        name: "auto" takes io_uring if it works and threads otherwise.
        entries: Reads that may be under way at a time, for io_uring.
        counters: Where a fallback is counted.

    Raises:
        PackError: UNAVAILABLE, io_uring was asked for by name and does not work here.
    """
    if name == "pread":
        return PoolEngine()
    try:
        from moet_store.ring import RingEngine

        return RingEngine(entries, counters)
    except (ImportError, OSError) as error:
        why, advice = _explain(error)
        if name == "io_uring":
            raise PackError(
                PackErrorKind.UNAVAILABLE,
                None,
                wanted="io_uring",
                found=why,
                advice=f"{advice}, or leave the engine to auto.",
            ) from error
        what = f"io_uring is not available: reading with {POOL_THREADS} pread threads"
        report_fallback(counters, what, why, advice)
        return PoolEngine()


def _explain(error: ImportError | OSError) -> tuple[str, str]:
    """Say what keeps io_uring from working, and what to do about it."""
    if isinstance(error, ImportError):
        return f"{error}", "run pip install liburing (Linux only)"
    why = os.strerror(error.errno or 0)
    match error.errno:
        case errno.EPERM | errno.EACCES:
            advice = (
                "allow io_uring_setup, io_uring_enter and io_uring_register in the container's "
                "seccomp profile, and set sysctl kernel.io_uring_disabled=0"
            )
        case errno.ENOSYS:
            advice = "run on a Linux kernel with io_uring, not under gVisor"
        case errno.ENOMEM:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            advice = f"raise the locked-memory limit of {limit // 1024} KiB (ulimit -l)"
        case errno.EMFILE | errno.ENFILE:
            advice = "raise the limit of open files (ulimit -n)"
        case _:
            advice = "see the kernel's log"
    return why, advice
