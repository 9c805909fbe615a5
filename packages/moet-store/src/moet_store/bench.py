"""Measures the reader against what the drive gives to others, in interleaved runs.

Shared drives swing by a factor of two within seconds. Everything that is compared is therefore
measured in rounds, one run of each a round, in an order drawn anew for each round, and ratios are
taken within a round.
"""

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from moet_core.results import Measurement, measurement
from moet_store.engines import POOL_THREADS
from moet_store.fio import FIO_DEPTHS, Sample, fio_version, run_fio, run_loop
from moet_store.memory import aligned_buffer
from moet_store.probe import rows_for, throughput, tune_depth
from moet_store.reader import PackReader
from moet_store.rows import Key
from moet_store.spec import HEADER_BYTES, PackSpec, plain_spec
from moet_store.writer import PackWriter

__all__ = ["Comparison", "Settings", "bench_store"]

MIB = 2**20
LAYERS = 4
TUNING_ROUNDS = 3
SINGLE = ", one row at a time"
UNCHECKED = " without checksums"

Run = Callable[[], Sample]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        row_bytes: Length of the rows of the test pack.
        pack_bytes: Length of the test pack, about.
        rounds: Runs of each kind.
        seconds: Length of a run.
    """

    row_bytes: int
    pack_bytes: int
    rounds: int = 9
    seconds: float = 1.0


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What was found for one row length.

    Attributes:
        row_bytes: Length of a row.
        yardstick: What the reader is compared with: "fio" with its engine and depth, or "plain
            O_DIRECT preadv loop".
        engine: The reader's engine.
        direct: Whether the reader went past the page cache.
        depth: The reader's depth, in rows.
        fallback_count: Slower ways that the reader had to take.
        ratio: Median over the rounds of the reader's rate by the yardstick's.
        measurements: All samples.
    """

    row_bytes: int
    yardstick: str
    engine: str
    direct: bool
    depth: int
    fallback_count: int
    ratio: float
    measurements: tuple[Measurement, ...]


def bench_store(
    folder: Path, settings: Settings, progress: Callable[[str, float], None]
) -> Comparison:
    """Write a test pack, measure, and delete it.

    Args:
        folder: Where: a folder on the drive in question.
        settings: What to measure.
        progress: Called with what is being done and the share of it that is done, 0 to 1.

    Raises:
        PackError: NO_SPACE, IO, or a row that could not be read.
    """
    with _test_pack(folder, settings, progress) as (path, spec), PackReader([path]) as reader:
        progress("finding queue depths", 0.0)
        # As long as fio gets to find its own.
        depth = tune_depth(reader, seconds=settings.seconds / 2, rounds=TUNING_ROUNDS)
        # As every run does, so that what it falls back to is counted.
        reader.register(aligned_buffer(rows_for(depth) * spec.row_bytes))
        name, yardstick, single = _yardstick(path, spec, settings, reader.engine)
        seconds = settings.seconds
        full = partial(_run_store, path, seconds=seconds, depth=depth)
        alone = partial(_run_store, path, seconds=seconds / 2, depth=1, rows=1)
        runs: dict[str, Run] = {
            "store": full,
            name: yardstick,
            f"store{UNCHECKED}": partial(full, verify=False),
            f"page cache, cold, {POOL_THREADS} pread threads": partial(
                _run_pool, path, spec, seconds
            ),
            f"store{SINGLE}": alone,
            f"store{UNCHECKED}{SINGLE}": partial(alone, verify=False),
            f"yardstick{SINGLE}": single,
        }
        samples = _rounds(runs, settings.rounds, progress)
        return Comparison(
            row_bytes=spec.row_bytes,
            yardstick=name,
            engine=reader.engine,
            direct=reader.direct,
            depth=depth,
            fallback_count=reader.counters.fallback_count,
            ratio=_ratio(samples["store"], samples[name]).median,
            measurements=tuple(_measurements(samples, name, spec.row_bytes)),
        )


@contextmanager
def _test_pack(
    folder: Path, settings: Settings, progress: Callable[[str, float], None]
) -> Iterator[tuple[Path, PackSpec]]:
    experts = max(1, settings.pack_bytes // settings.row_bytes // LAYERS)
    layers = tuple(range(LAYERS))
    spec = plain_spec(
        "moet bench store", payload_bytes=settings.row_bytes, layers=layers, experts=experts
    )
    row = np.random.default_rng(0).integers(0, 256, settings.row_bytes, dtype=np.uint8)

    def rows(layer: int) -> Iterator[np.ndarray]:
        for expert in range(experts):
            # Rows must differ, or a drive that compresses or deduplicates would shine.
            row[:] = np.roll(row, 4099)
            progress("writing the test pack", (layer * experts + expert) / (LAYERS * experts))
            yield row

    with tempfile.TemporaryDirectory(prefix="moet-bench-", dir=folder) as scratch:
        with PackWriter(Path(scratch), spec) as writer:
            for layer in layers:
                writer.write_layer(layer, rows(layer))
        _drop_cache(writer.path)
        yield writer.path, spec


def _run_store(
    path: Path, *, seconds: float, depth: int, rows: int | None = None, verify: bool = True
) -> Sample:
    """Read random rows, `rows` of them under way, by default enough for the kernel to have `depth`.

    Every run takes new memory, as fio does: where the machine happens to place it changes the
    rate, and would otherwise be drawn once for all runs of a kind.
    """
    order = random.Random()  # noqa: S311 - which rows are read is no secret
    with PackReader([path], depth=depth, verify=verify) as reader:
        rows = rows or rows_for(depth)
        region = aligned_buffer(rows * reader.spec.row_bytes)
        reader.register(region)
        keys: list[Key] = reader.written_keys()
        cpu = time.process_time()
        rate = throughput(reader, keys, order, region, rows, seconds)
        cpu = time.process_time() - cpu
        found = reader.counters.snapshot()
    assert found.read_p50_ms is not None
    return Sample(rate, cpu / found.bytes_read * 1e9, found.read_p50_ms / 1e3)


def _yardstick(path: Path, spec: PackSpec, settings: Settings, engine: str) -> tuple[str, Run, Run]:
    """Return the name of what to compare with, a run at its best, and one row at a time."""
    half = settings.seconds / 2
    if fio_version() is None:
        name = "plain O_DIRECT preadv loop"
        return (
            name,
            lambda: run_loop(path, spec, seconds=settings.seconds),
            lambda: run_loop(path, spec, seconds=half),
        )
    # Where the kernel has no io_uring, fio has none either.
    kind = "io_uring" if engine == "io_uring" else "psync"

    def fio(depth: int, seconds: float) -> Sample:
        return run_fio(path, spec, depth=depth, seconds=seconds, engine=kind)

    rates = dict.fromkeys(FIO_DEPTHS, 0.0)
    for _ in range(TUNING_ROUNDS):
        for depth in FIO_DEPTHS:
            rates[depth] += fio(depth, half).rate
    best = max(rates, key=lambda depth: rates[depth])
    return f"fio {kind} depth {best}", lambda: fio(best, settings.seconds), lambda: fio(1, half)


def _run_pool(path: Path, spec: PackSpec, seconds: float) -> Sample:
    """Read random rows through a cold page cache with a pool of threads, without checksums."""
    _drop_cache(path)
    rows = list(range(len(spec.layers) * len(spec.held)))
    random.shuffle(rows)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    times: list[float] = []
    begin, cpu = time.perf_counter(), time.process_time()

    def work(share: list[int]) -> None:
        buffer = aligned_buffer(spec.row_bytes)
        for row in share:
            now = time.perf_counter()
            if now - begin >= seconds:
                return
            at = 0
            while at < spec.row_bytes:
                offset = HEADER_BYTES + row * spec.row_bytes + at
                at += os.preadv(fd, [buffer[at:]], offset)
            times.append(time.perf_counter() - now)

    try:
        with ThreadPoolExecutor(POOL_THREADS) as pool:
            # No row twice: a second read would come from memory.
            list(pool.map(work, [rows[start::POOL_THREADS] for start in range(POOL_THREADS)]))
        elapsed, cpu = time.perf_counter() - begin, time.process_time() - cpu
    finally:
        os.close(fd)
    total = len(times) * spec.row_bytes
    return Sample(total / elapsed, cpu / total * 1e9, sorted(times)[len(times) // 2])


def _drop_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _rounds(
    runs: dict[str, Run], rounds: int, progress: Callable[[str, float], None]
) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {name: [] for name in runs}
    for number in range(rounds):
        # Shuffled: a run leaves memory and drive to the next, so that neighbours must change.
        order = random.sample(list(runs), len(runs))
        for place, name in enumerate(order):
            progress("measuring", (number * len(runs) + place) / (rounds * len(runs)))
            samples[name].append(runs[name]())
    return samples


def _ratio(ours: list[Sample], theirs: list[Sample], name: str = "ratio") -> Measurement:
    pairs = zip(ours, theirs, strict=True)
    return measurement(name, "ratio", [mine.rate / other.rate for mine, other in pairs])


def _measurements(
    samples: dict[str, list[Sample]], yardstick: str, row_bytes: int
) -> Iterator[Measurement]:
    rows = f"{row_bytes / MIB:g} MiB rows"
    for name, found in samples.items():
        yield measurement(f"{rows}: {name}", "GB/s", [sample.rate / 1e9 for sample in found])
        yield measurement(f"{rows}: {name}, processor", "s/GB", [sample.cpu for sample in found])
        if name.endswith(SINGLE):
            latencies = [sample.latency * 1e3 for sample in found]
            yield measurement(f"{rows}: {name}, median latency", "ms", latencies)
    store = samples["store"]
    for name, found in samples.items():
        if name != "store" and not name.endswith(SINGLE):
            yield _ratio(store, found, f"{rows}: store / {name}")
    for how in ("", UNCHECKED):
        pairs = zip(samples[f"store{how}{SINGLE}"], samples[f"yardstick{SINGLE}"], strict=True)
        ratios = [ours.latency / theirs.latency for ours, theirs in pairs]
        yield measurement(f"{rows}: latency{SINGLE}, of store{how} / yardstick", "ratio", ratios)
