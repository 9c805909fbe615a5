"""Finds how many reads a drive wants at a time."""

import random
import statistics
import time

from moet_store.memory import aligned_buffer
from moet_store.reader import PackReader
from moet_store.rows import Key

__all__ = ["DEPTHS", "rows_for", "throughput", "tune_depth"]

DEPTHS = (1, 2, 4, 8)
"""Rows with the kernel; one more is being hashed, or waits for its turn."""

NEAR = 0.97
"""A smaller depth that reaches so much of the best is better: demand reads wait less behind it."""


def tune_depth(reader: PackReader, *, seconds: float = 0.1, rounds: int = 5) -> int:
    """Measure depths in turn and set the smallest that is as good as the best.

    Reads random rows for about `seconds * rounds * len(DEPTHS)`; nothing else may be reading. What
    it read is not counted.

    Args:
        reader: The reader to tune.
        seconds: How long one measurement takes.
        rounds: Measurements of each depth, taken alternately because shared drives swing.

    Returns:
        The depth that was set.
    """
    keys = reader.written_keys()
    if not keys:
        return reader.depth
    chosen: list[int] = []
    for depth in DEPTHS:
        reader.set_depth(depth)
        if reader.depth not in chosen:
            chosen.append(reader.depth)
    samples: dict[int, list[float]] = {depth: [] for depth in chosen}
    region = aligned_buffer(rows_for(max(chosen)) * reader.spec.row_bytes)
    order = random.Random(0)  # noqa: S311 - which rows are read is no secret
    for _ in range(rounds):
        for depth in chosen:
            reader.set_depth(depth)
            under_way = rows_for(depth)
            samples[depth].append(throughput(reader, keys, order, region, under_way, seconds))
    medians = {depth: statistics.median(found) for depth, found in samples.items()}
    best = max(medians.values())
    depth = next(depth for depth in chosen if medians[depth] >= NEAR * best)
    reader.set_depth(depth)
    reader.counters.forget_reads()
    return depth


def throughput(
    reader: PackReader,
    keys: list[Key],
    order: random.Random,
    region: memoryview,
    rows: int,
    seconds: float,
) -> float:
    """Read random rows and return bytes a second.

    Args:
        reader: The reader.
        keys: Rows to choose from.
        order: How to choose.
        region: Where to: `rows` rows or more, page-aligned.
        rows: Rows under way at a time.
        seconds: When to start no more.

    Raises:
        PackError: A row could not be read.
    """
    row_bytes = reader.spec.row_bytes
    begin = time.perf_counter()
    buffers = {}
    for at in range(0, rows * row_bytes, row_bytes):
        (ticket,) = reader.submit([order.choice(keys)], [region[at : at + row_bytes]])
        buffers[ticket] = region[at : at + row_bytes]
    done, elapsed = 0, 0.0
    while buffers:
        for completion in reader.wait_any():
            if completion.error is not None:
                raise completion.error
            done += 1
            elapsed = time.perf_counter() - begin
            buffer = buffers.pop(completion.ticket)
            if elapsed < seconds:
                (ticket,) = reader.submit([order.choice(keys)], [buffer])
                buffers[ticket] = buffer
    return done * row_bytes / elapsed


def rows_for(depth: int) -> int:
    """Return how many rows must be under way to keep `depth` of them with the kernel."""
    return depth + 1
