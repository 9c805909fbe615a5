"""What the store counts; one owner changes it, anyone reads snapshots."""

import statistics
from collections import deque

import msgspec

__all__ = ["Counters", "Snapshot"]

LATENCIES = 2048
"""Percentiles are of the last so many reads: what the drive does now, not since the start."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The counters at one moment.

    Attributes:
        hits: Rows found in the arena.
        misses: Rows that were not.
        evictions: Rows that made room for others.
        rows_read: Rows read from disk and verified.
        bytes_read: Bytes of those rows.
        read_p50_ms: Median time of a row from its first submission until it is verified, in
            milliseconds; None before the first.
        read_p99_ms: The 99th percentile of the same.
        queue_depth: Rows that may be with the kernel at a time.
        in_flight: Rows that are with the kernel.
        queued: Rows, or rests of rows, that wait for their turn.
        retries: Reads repeated after EAGAIN, EINTR or a short count.
        fallback_count: Times that a slower way was taken for good: no io_uring, no O_DIRECT, no
            registered buffers.
        io_errors: Reads that the kernel refused.
        checksum_errors: Rows whose bytes differed from their checksum.
    """

    hits: int
    misses: int
    evictions: int
    rows_read: int
    bytes_read: int
    read_p50_ms: float | None
    read_p99_ms: float | None
    queue_depth: int
    in_flight: int
    queued: int
    retries: int
    fallback_count: int
    io_errors: int
    checksum_errors: int


class Counters:
    """The running counts; see `Snapshot` for what they mean."""

    __slots__ = (
        "checksum_errors",
        "evictions",
        "fallback_count",
        "hits",
        "in_flight",
        "io_errors",
        "latencies",
        "misses",
        "queue_depth",
        "queued",
        "retries",
        "row_bytes",
        "rows_read",
    )

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self.hits = self.misses = self.evictions = self.rows_read = 0
        self.queue_depth = self.in_flight = self.queued = 0
        self.retries = self.fallback_count = self.io_errors = self.checksum_errors = 0
        self.latencies: deque[float] = deque(maxlen=LATENCIES)

    def forget_reads(self) -> None:
        """Forget the rows read so far; what went wrong stays counted."""
        self.rows_read = 0
        self.latencies.clear()

    def snapshot(self) -> Snapshot:
        """Return the counts as they are."""
        p50, p99 = _percentiles(self.latencies)
        derived = {"bytes_read", "read_p50_ms", "read_p99_ms"}
        plain = {
            name: getattr(self, name) for name in Snapshot.__struct_fields__ if name not in derived
        }
        return Snapshot(
            bytes_read=self.rows_read * self.row_bytes,
            read_p50_ms=p50,
            read_p99_ms=p99,
            **plain,
        )


def _percentiles(seconds: deque[float]) -> tuple[float | None, float | None]:
    if not seconds:
        return None, None
    if len(seconds) == 1:
        return seconds[0] * 1e3, seconds[0] * 1e3
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return cuts[49] * 1e3, cuts[98] * 1e3
