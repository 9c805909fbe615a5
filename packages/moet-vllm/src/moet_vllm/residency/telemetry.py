"""What a pool of experts does, on vLLM's /metrics and as a line in its log."""

import functools
import logging
import time
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import msgspec
from prometheus_client import Counter, Gauge

from moet_core.gate import GateCounts
from moet_store import Snapshot
from moet_vllm.events import Pool, emit
from moet_vllm.residency.counts import Counts
from moet_vllm.residency.heat import save_hot_keys
from moet_vllm.residency.metric_names import (
    COUNTERS,
    FINE_COUNTERS,
    GATE_COUNTERS,
    GATE_GAUGES,
    GAUGES,
    STORE_COUNTERS,
    Metrics,
)
from moet_vllm.residency.resident import ResidentExperts
from moet_vllm.residency.tier import Tier

__all__ = ["PoolState", "Telemetry"]

logger = logging.getLogger("vllm.moet")

MOST_TOKENS = 2**16
"""Where the search for the largest repairable step ends."""


class PoolState(msgspec.Struct, frozen=True):
    """What a pool is at one moment; `metric_names.GAUGES` says what the fields mean."""

    slots: int
    resident: int
    coverage: float
    row_bytes: int


class Telemetry:
    """Publishes the counts of one rank.

    vLLM's API server shows them if its processes share a folder of metrics
    (`PROMETHEUS_MULTIPROC_DIR`, which `moet serve` sets); the log has them in any case. Of two
    pools of one rank in one process, one after the other or at once, counters show the sum and
    gauges what was published last.

    Args:
        resident: The rank's experts.
        rank: Number of the rank, a label of every metric.
        report_seconds: Time between two lines in the log, each of which also keeps the heat for
            the next start; 0 for neither.
    """

    def __init__(self, resident: ResidentExperts, rank: int, report_seconds: float) -> None:
        self.resident = resident
        self.rank = rank
        self.report_seconds = report_seconds
        self._counters = {
            name: _metric(Counter, name, text).labels(rank=str(rank))
            for name, (_, text) in self._sources()
        }
        self._gauges = {
            name: _metric(Gauge, name, text).labels(rank=str(rank))
            for name, (_, text) in (GAUGES | (GATE_GAUGES if self._has_gate else {})).items()
        }
        self._published: dict[str, float] = dict.fromkeys(self._counters, 0)
        self._reported = Counts(row_bytes=resident.counts.row_bytes)
        self._next_report = time.monotonic() + report_seconds

    def _sources(self) -> Iterable[tuple[str, tuple[str, str]]]:
        fine = self.resident.fine
        names = COUNTERS | STORE_COUNTERS
        names |= FINE_COUNTERS if fine is not None else {}
        names |= GATE_COUNTERS if self._has_gate else {}
        return names.items()

    @property
    def _has_gate(self) -> bool:
        return self.resident.fine is not None and self.resident.fine.gate is not None

    def started(self) -> None:
        """Report the sizes of the pool, before the first step."""
        shape = self.resident.shape
        emit(
            Pool(
                rank=self.rank,
                slots=shape.slots,
                ring=shape.ring,
                experts=shape.all_experts,
                coverage=round(shape.coverage, 4),
                pool_bytes=(shape.slots + shape.ring) * shape.row.row_bytes,
                working_set_of_one_token=shape.working_set(1),
                repairable_tokens=bisect_right(
                    range(1, MOST_TOKENS + 1), shape.slots, key=shape.working_set
                ),
                store=self.resident.store.description,
            )
        )
        self.publish()

    def step_ended(self) -> None:
        """Publish, and report if it is time to."""
        # After every step: whatever waited for the next one would be missing while none comes.
        self.publish()
        now = time.monotonic()
        if self.report_seconds and now >= self._next_report:
            self._next_report = now + self.report_seconds
            self.report()
            save_hot_keys(self.resident)

    def publish(self) -> None:
        """Bring the metrics up to date."""
        self._count(COUNTERS, self.resident.counts)
        stored = self.resident.store.counters()
        if stored is not None:
            self._count(STORE_COUNTERS, stored)
        fine = self.resident.fine
        if fine is not None:
            self._count(FINE_COUNTERS, fine.tier)
            if fine.gate is not None:
                self._count(GATE_COUNTERS, fine.gate.counts)
                for name, (field, _) in GATE_GAUGES.items():
                    self._gauges[name].set(getattr(fine.gate.settings, field))
        shape = self.resident.shape
        state = PoolState(
            shape.slots, self.resident.policy.resident, shape.coverage, shape.row.row_bytes
        )
        for name, (field, _) in GAUGES.items():
            self._gauges[name].set(getattr(state, field))

    def report(self) -> None:
        """Write one line about the steps since the last line; none if there were no steps."""
        since = _difference(self.resident.counts, self._reported)
        self._reported = msgspec.structs.replace(self.resident.counts)
        steps = since.steps
        if not steps:
            return
        logger.info(
            "moet: %d steps, %.1f %% repaired, %d streamed, %.2f passes a step, hit rate %.1f %%, "
            "%.1f missed a step, %.1f MiB moved a step, %.1f ms stalled a step, %d failed, "
            "%d degraded, pool %d of %d",
            steps,
            100 * since.repaired / steps,
            since.streamed,
            since.passes / steps,
            100 * (1 - since.missed / since.wanted) if since.wanted else 100.0,
            since.missed / steps,
            (since.brought + since.promoted) * since.row_bytes / 2**20 / steps,
            1000 * since.stall_seconds / steps,
            since.failed,
            since.degraded,
            self.resident.policy.resident,
            self.resident.shape.slots,
        )
        gate = self.resident.fine.gate if self.resident.fine is not None else None
        if gate is not None and gate.counts.checked:
            counts = gate.counts
            logger.info(
                "moet: gate since the start: %d of %d steps fired (%.1f %%), %d changed the next "
                "token; %d audits, %d changed it; %.1f experts and %.1f ms a fire or audit",
                counts.fires,
                counts.checked,
                100 * counts.fires / counts.checked,
                counts.flipped,
                counts.audits,
                counts.audit_flipped,
                counts.promoted / max(counts.fires + counts.audits, 1),
                1000 * counts.seconds / max(counts.fires + counts.audits, 1),
            )

    def _count(self, metrics: Metrics, counts: Counts | Snapshot | Tier | GateCounts) -> None:
        for name, (field, _) in metrics.items():
            value = getattr(counts, field)
            if value != self._published[name]:
                self._counters[name].inc(value - self._published[name])
                self._published[name] = value


def _difference(now: Counts, before: Counts) -> Counts:
    names = [name for name in Counts.__struct_fields__ if name != "row_bytes"]
    changes = {name: getattr(now, name) - getattr(before, name) for name in names}
    return Counts(row_bytes=now.row_bytes, **changes)


@functools.cache
def _metric(kind: Any, name: str, text: str) -> Any:
    """Return the metric of this process: two engines in it share one."""
    more = {"multiprocess_mode": "mostrecent"} if kind is Gauge else {}
    return kind(name, text, ["rank"], **more)
