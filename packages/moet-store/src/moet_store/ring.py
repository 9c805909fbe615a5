"""Reads through io_uring, by the liburing package.

Two things about that package shape this file. Its calls hold Python's global lock, so that waiting
is done by poll(2) on the ring's descriptor, which does not. And its fixed-buffer read takes
bytearrays only, so that registered memory is read into by the vectored form, which kernels have
since 6.15.
"""

import errno
import os
import resource
import select
import time
from bisect import bisect_right

import liburing as uring

from moet_store.counters import Counters
from moet_store.engines import report_fallback
from moet_store.errors import PackError, PackErrorKind
from moet_store.memory import address_of

__all__ = ["RingEngine"]

MAX_REGISTERED = 2**30
"""The kernel takes no larger piece of memory as one registered buffer."""

MAX_BUFFERS = 1024
"""The binding passes at most so many pieces at once."""

BUSY_SECONDS = 0.001
BUSY_LIMIT = 1000
"""How often in a row the kernel may refuse a submission while nothing is under way."""


class RingEngine:
    """See `moet_store.engines.Engine`.

    Raises:
        OSError: The kernel or a filter refuses io_uring.
    """

    name = "io_uring"

    def __init__(self, entries: int, counters: Counters) -> None:
        self.entries = entries
        self._counters = counters
        self._ring = uring.Ring()
        self._cqe = uring.Cqe()
        self._closed = True
        uring.io_uring_queue_init(entries, self._ring)
        self._closed = False
        self._poll = select.poll()
        self._poll.register(self._ring.ring_fd, select.POLLIN)
        self._files: dict[int, int] = {}
        self._starts: list[int] = []
        self._regions: list[memoryview] = []
        # The kernel reads a vector when it takes the request, which may be after submit returned.
        self._vectors: dict[int, uring.Iovec] = {}
        self._submitted = self._busy = 0

    def add_file(self, fd: int) -> None:
        """See `Engine`; a kernel that refuses costs a little time for each read, nothing else."""
        if self._files:
            uring.io_uring_unregister_files(self._ring)
        fds = [*self._files, fd]
        self._files = {}
        try:
            uring.io_uring_register_files(self._ring, uring.FileIndex(fds))
        except OSError as error:
            why = os.strerror(error.errno or 0)
            report_fallback(self._counters, "files are not registered", why, "raise ulimit -n")
            return
        self._files = {known: index for index, known in enumerate(fds)}

    def register(self, region: memoryview, row_bytes: int) -> None:
        """See `Engine`; falls back to plain memory where limits or the kernel refuse."""
        step = MAX_REGISTERED // row_bytes * row_bytes
        parts = [region[at : at + step] for at in range(0, len(region), step)]
        what = "memory is not registered with io_uring: each read pins its pages anew"
        operation = uring.io_uring_op.IORING_OP_READV_FIXED
        if not uring.io_uring_opcode_supported(uring.io_uring_get_probe(), operation):
            advice = "reads work, a little slower"
            report_fallback(self._counters, what, "kernel before 6.15", advice)
            return
        if len(parts) > MAX_BUFFERS:
            why = f"{len(parts)} pieces of a GiB, at most {MAX_BUFFERS}"
            report_fallback(self._counters, what, why, "make the arena smaller")
            return
        try:
            uring.io_uring_register_buffers(self._ring, uring.Iovec(parts))
        except OSError as error:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] // 1024
            why = f"{os.strerror(error.errno or 0)}; limit {limit} KiB, need {len(region) // 1024}"
            report_fallback(self._counters, what, why, "raise the limit with ulimit -l")
            return
        self._regions = parts
        self._starts = [address_of(part) for part in parts]

    def start(self, tag: int, fd: int, buffer: memoryview, offset: int) -> None:
        """See `Engine`."""
        sqe = uring.io_uring_get_sqe(self._ring)
        vector = self._vectors[tag] = uring.Iovec([buffer])
        file = self._files.get(fd)
        target = fd if file is None else file
        registered = self._registered(buffer)
        if registered is None:
            uring.io_uring_prep_readv(sqe, target, vector, offset)
        else:
            uring.io_uring_prep_readv_fixed(sqe, target, vector, registered, offset, 0)
        if file is not None:
            sqe.flags = uring.IOSQE_FIXED_FILE
        sqe.user_data = tag

    def submit(self) -> None:
        """See `Engine`; what the kernel does not take now stays queued for the next call.

        Raises:
            PackError: IO, the kernel takes nothing although nothing is under way, again and again.
        """
        if not uring.io_uring_sq_ready(self._ring):
            return
        try:
            self._submitted += uring.io_uring_submit(self._ring)
            self._busy = 0
        except OSError as error:
            self._counters.retries += 1
            self._busy += 1
            refused = error.errno not in (errno.EAGAIN, errno.EBUSY, errno.EINTR)
            if refused or (self._busy > BUSY_LIMIT and not self._submitted):
                raise PackError(
                    PackErrorKind.IO,
                    None,
                    wanted="the kernel to take reads",
                    found=f"{os.strerror(error.errno or 0)}, {self._busy} times",
                    advice="See the kernel's log; reading with engine pread avoids io_uring.",
                ) from error

    def reap(self) -> list[tuple[int, int]]:
        """See `Engine`."""
        ended: list[tuple[int, int]] = []
        while uring.io_uring_cq_ready(self._ring):
            uring.io_uring_peek_cqe(self._ring, self._cqe)
            cqe = self._cqe[0]
            tag = cqe.user_data
            try:
                result = cqe.res
            except OSError as error:
                result = -(error.errno or errno.EIO)
            uring.io_uring_cqe_seen(self._ring, cqe)
            del self._vectors[tag]
            ended.append((tag, result))
        self._submitted -= len(ended)
        return ended

    def wait(self, seconds: float) -> None:
        """See `Engine`."""
        if uring.io_uring_sq_ready(self._ring):
            self.submit()
        if not self._submitted:
            # The kernel takes nothing at the moment; it has nothing that could wake us either.
            time.sleep(min(seconds, BUSY_SECONDS))
            return
        self._poll.poll(seconds * 1000)

    def close(self) -> None:
        """See `Engine`."""
        if not self._closed:
            self._closed = True
            # The kernel takes a ring apart later; the file system must be free of it now.
            if self._files:
                uring.io_uring_unregister_files(self._ring)
            if self._regions:
                uring.io_uring_unregister_buffers(self._ring)
            uring.io_uring_queue_exit(self._ring)

    def _registered(self, buffer: memoryview) -> int | None:
        if not self._starts:
            return None
        address = address_of(buffer)
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address + len(buffer) > self._starts[index] + len(self._regions[index]):
            return None
        return index
