"""What a pool of experts does, on vLLM's /metrics and as a line in its log."""

import logging
import time

import msgspec
from prometheus_client import REGISTRY, Counter, Gauge

from moet_vllm.events import Pool, emit
from moet_vllm.residency.counts import Counts
from moet_vllm.residency.heat import save_hot_keys
from moet_vllm.residency.resident import ResidentExperts

__all__ = ["COUNTERS", "GAUGES", "STORE_COUNTERS", "Telemetry"]

logger = logging.getLogger("vllm.moet")

COUNTERS = {
    "moet_steps": ("steps", "Steps that ran."),
    "moet_repaired_steps": ("repaired", "Steps that missed experts and were run again."),
    "moet_streamed_steps": ("streamed", "Steps that fetched experts layer by layer."),
    "moet_failed_steps": ("failed", "Steps without a result: an expert could not be read."),
    "moet_degraded_steps": ("degraded", "Steps accepted with experts missing."),
    "moet_passes": ("passes", "Forward passes."),
    "moet_wanted_experts": ("wanted", "Distinct experts that steps wanted."),
    "moet_missed_experts": ("missed", "Distinct experts that were not in the pool."),
    "moet_brought_experts": ("brought", "Experts copied to the device while a step waited."),
    "moet_promoted_experts": ("promoted", "Experts copied to the device between steps."),
    "moet_stall_seconds": ("stall_seconds", "Time that steps waited for experts."),
}
"""Metric names (Prometheus adds _total) and the fields of `Counts` behind them."""

GAUGES = {
    "moet_pool_slots": "Experts that the pool can hold.",
    "moet_pool_resident": "Experts that the pool holds.",
    "moet_pool_coverage": "Share of the rank's experts that the pool can hold.",
    "moet_row_bytes": "Bytes of one expert.",
}

STORE_COUNTERS = {
    "moet_store_hits": ("hits", "Experts found in the arena."),
    "moet_store_misses": ("misses", "Experts not found in the arena."),
    "moet_store_bytes_read": ("bytes_read", "Bytes read from packs and verified."),
    "moet_store_errors": ("io_errors", "Reads that the kernel refused."),
    "moet_store_checksum_errors": ("checksum_errors", "Experts whose bytes were damaged."),
}

REFRESH_SECONDS = 1.0


class Telemetry:
    """Publishes the counts of one rank.

    vLLM's API server shows them if its processes share a folder of metrics
    (`PROMETHEUS_MULTIPROC_DIR`, which `moet serve` sets); the log has them in any case.

    Args:
        resident: The rank's experts.
        rank: Number of the rank, a label of every metric.
        report_seconds: Time between two lines in the log; 0 for none.
    """

    def __init__(self, resident: ResidentExperts, rank: int, report_seconds: float) -> None:
        self.resident = resident
        self.rank = rank
        self.report_seconds = report_seconds
        label = str(rank)
        self._counters = {
            field: _metric(Counter, name, text).labels(rank=label)
            for name, (field, text) in COUNTERS.items()
        }
        self._store_counters = {
            field: _metric(Counter, name, text).labels(rank=label)
            for name, (field, text) in STORE_COUNTERS.items()
        }
        self._gauges = {
            name: _metric(Gauge, name, text).labels(rank=label) for name, text in GAUGES.items()
        }
        self._published: dict[str, float] = {}
        self._reported = Counts(row_bytes=resident.counts.row_bytes)
        self._next_refresh = 0.0
        self._next_report = time.monotonic() + report_seconds

    def started(self) -> None:
        """Report the sizes of the pool, before the first step."""
        shape = self.resident.shape
        tokens = 0
        while tokens < 2**16 and shape.working_set(tokens + 1) <= shape.slots:
            tokens += 1
        emit(
            Pool(
                rank=self.rank,
                slots=shape.slots,
                ring=shape.ring,
                experts=shape.all_experts,
                coverage=round(shape.coverage, 4),
                pool_bytes=(shape.slots + shape.ring) * shape.row.row_bytes,
                working_set_of_one_token=shape.working_set(1),
                repairable_tokens=tokens,
                store=type(self.resident.store).__name__,
            )
        )
        self.publish()

    def step_ended(self) -> None:
        """Publish and report if it is time to."""
        now = time.monotonic()
        if now >= self._next_refresh:
            self._next_refresh = now + REFRESH_SECONDS
            self.publish()
        if self.report_seconds and now >= self._next_report:
            self._next_report = now + self.report_seconds
            self.report()
            save_hot_keys(self.resident)

    def publish(self) -> None:
        """Bring the metrics up to date."""
        counts = self.resident.counts
        for field, counter in self._counters.items():
            self._add(f"pool {field}", counter, getattr(counts, field))
        stored = self.resident.store.counters()
        if stored is not None:
            for field, counter in self._store_counters.items():
                self._add(f"store {field}", counter, getattr(stored, field))
        shape = self.resident.shape
        self._gauges["moet_pool_slots"].set(shape.slots)
        self._gauges["moet_pool_resident"].set(self.resident.policy.resident)
        self._gauges["moet_pool_coverage"].set(shape.coverage)
        self._gauges["moet_row_bytes"].set(shape.row.row_bytes)

    def report(self) -> None:
        """Write one line about the steps since the last line."""
        now, before = self.resident.counts, self._reported
        self._reported = msgspec.structs.replace(now)
        steps = now.steps - before.steps
        if not steps:
            return
        wanted, missed = now.wanted - before.wanted, now.missed - before.missed
        moved = (now.brought + now.promoted - before.brought - before.promoted) * now.row_bytes
        logger.info(
            "moet: %d steps, %.1f %% repaired, %d streamed, %.2f passes a step, hit rate %.1f %%, "
            "%.1f missed a step, %.1f MiB moved a step, %.1f ms stalled a step, %d failed, pool "
            "%d of %d",
            steps,
            100 * (now.repaired - before.repaired) / steps,
            now.streamed - before.streamed,
            (now.passes - before.passes) / steps,
            100 * (1 - missed / wanted) if wanted else 100.0,
            missed / steps,
            moved / 2**20 / steps,
            1000 * (now.stall_seconds - before.stall_seconds) / steps,
            now.failed - before.failed,
            self.resident.policy.resident,
            self.resident.shape.slots,
        )

    def _add(self, key: str, counter: Counter, value: float) -> None:
        counter.inc(value - self._published.get(key, 0.0))
        self._published[key] = value


def _metric(kind: type, name: str, text: str):
    """Return the metric of this process, made on first use: a process may load two engines."""
    known = REGISTRY._names_to_collectors.get(name)
    if known is not None:
        return known
    more = {"multiprocess_mode": "mostrecent"} if kind is Gauge else {}
    return kind(name, text, ["rank"], **more)
