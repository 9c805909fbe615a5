"""What a server did between two looks at its metrics."""

import math
from typing import Any

import msgspec

from moet_cli.metrics import Labels, MetricsError, Page
from moet_vllm.residency.metric_names import COUNTERS, GAUGES, STORE_COUNTERS

__all__ = ["NAMES", "RankRates", "Rates", "ServingRates", "compare"]

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_CACHE = "vllm:kv_cache_usage_perc"
DECODED = "vllm:generation_tokens_total"
PROMPTS = "vllm:prompt_tokens_total"

_RANK_COUNTERS = {
    f"{name}_total": field for name, (field, _) in (COUNTERS | STORE_COUNTERS).items()
}
_RANK_GAUGES = {name: field for name, (field, _) in GAUGES.items()}
_RANK_METRICS = _RANK_COUNTERS | _RANK_GAUGES
_RISING = {DECODED, PROMPTS, *_RANK_COUNTERS}

NAMES = frozenset({RUNNING, WAITING, KV_CACHE, DECODED, PROMPTS, *_RANK_METRICS})
"""Every sample that `compare` reads, as it is called on a page."""


class ServingRates(msgspec.Struct, frozen=True, kw_only=True):
    """What vLLM says of itself; None where it says nothing.

    Attributes:
        running: Requests that are being computed, of all engines.
        waiting: Requests that wait.
        decode_tokens_per_second: Generated tokens.
        prompt_tokens_per_second: Tokens of prompts.
        kv_cache_used: Share of the KV cache, of the fullest engine.
    """

    running: int | None
    waiting: int | None
    decode_tokens_per_second: float | None
    prompt_tokens_per_second: float | None
    kv_cache_used: float | None


class RankRates(msgspec.Struct, frozen=True, kw_only=True):
    """What the pool of experts of one rank did; None where nothing was counted.

    Attributes:
        rank: Number of the rank.
        steps_per_second: Steps of the model.
        repaired_share: Share of the steps that missed experts and were run again.
        streamed_share: Share of the steps that fetched experts layer by layer.
        passes_per_step: Forward passes.
        hit_rate: Share of the wanted experts that were in the pool.
        misses_per_step: Wanted experts that were not.
        moved_bytes_per_second: Bytes of experts that were copied to the device.
        stall_ms_per_step: Time that a step waited for experts.
        failed_steps: Steps without a result, since the server started.
        degraded_steps: Steps accepted with experts missing, since the server started.
        slots: Experts that the pool can hold.
        resident: Experts that it holds.
        coverage: Share of the rank's experts that it can hold.
        arena_hit_rate: Share of the experts looked up in the arena that were there.
        read_bytes_per_second: Bytes read from packs.
        read_errors: Reads that the kernel refused, since the server started.
        checksum_errors: Experts whose bytes were damaged, since the server started.
    """

    rank: int
    steps_per_second: float | None
    repaired_share: float | None
    streamed_share: float | None
    passes_per_step: float | None
    hit_rate: float | None
    misses_per_step: float | None
    moved_bytes_per_second: float | None
    stall_ms_per_step: float | None
    failed_steps: int | None
    degraded_steps: int | None
    slots: int | None
    resident: int | None
    coverage: float | None
    arena_hit_rate: float | None
    read_bytes_per_second: float | None
    read_errors: int | None
    checksum_errors: int | None


class Rates(msgspec.Struct, frozen=True):
    """What a server did.

    Attributes:
        seconds: Time between the two looks; None if there is only one that counts.
        restarted: A counter went back, so that the second look is the first of a new window.
        serving: Of the whole server.
        ranks: Of each rank that has a pool of experts, in order.
    """

    seconds: float | None
    restarted: bool
    serving: ServingRates
    ranks: tuple[RankRates, ...]


def compare(now: Page, before: Page | None) -> Rates:
    """Return what happened between two pages; without a first one, the state alone.

    Raises:
        MetricsError: A metric of a pool has no number as its rank.
    """
    restarted = before is not None and _went_back(now, before)
    if restarted:
        before = None
    seconds = math.nan if before is None else now.at - before.at
    rank_values = _rank_values(now)
    values_before = {} if before is None else _rank_values(before)
    return Rates(
        _figure(seconds),
        restarted,
        _serving(now, before, seconds),
        tuple(
            _rank(rank, rank_values[rank], values_before.get(rank, {}), seconds)
            for rank in sorted(rank_values)
        ),
    )


def _went_back(now: Page, before: Page) -> bool:
    return any(
        now.values.get(name, {}).get(labels, -math.inf) < value
        for name in _RISING & before.values.keys()
        for labels, value in before.values[name].items()
    )


def _rank_values(page: Page) -> dict[int, dict[str, float]]:
    """Return the values of each rank, by the field behind the metric."""
    ranks: dict[int, dict[str, float]] = {}
    for name in _RANK_METRICS.keys() & page.values.keys():
        for labels, value in page.values[name].items():
            ranks.setdefault(_number(name, labels), {})[_RANK_METRICS[name]] = value
    return ranks


def _number(name: str, labels: Labels) -> int:
    rank = dict(labels).get("rank", "")
    if not (rank.isascii() and rank.isdecimal() and len(rank) < 10):
        raise MetricsError(
            f"Wanted {name} with the number of a rank, found rank={rank[:40]!r}: these are no "
            "metrics of this version of moet."
        )
    return int(rank)


def _serving(now: Page, before: Page | None, seconds: float) -> ServingRates:
    return ServingRates(
        running=_whole(_sum(now, RUNNING)),
        waiting=_whole(_sum(now, WAITING)),
        decode_tokens_per_second=_figure(_ratio(_rise(now, before, DECODED), seconds)),
        prompt_tokens_per_second=_figure(_ratio(_rise(now, before, PROMPTS), seconds)),
        kv_cache_used=max(now.values.get(KV_CACHE, {}).values(), default=None),
    )


def _sum(page: Page, name: str) -> float:
    return sum(page.values[name].values()) if name in page.values else math.nan


def _rise(now: Page, before: Page | None, name: str) -> float:
    """Return how much was counted by engines that are on both pages."""
    found = {} if before is None else before.values.get(name, {})
    return sum(now.values[name][labels] - found[labels] for labels in found) if found else math.nan


def _rank(rank: int, now: dict[str, float], before: dict[str, float], seconds: float) -> RankRates:
    # A value that is missing is NaN, and so is all that follows from it.
    def value(field: str) -> float:
        return now.get(field, math.nan)

    def rise(field: str) -> float:
        return value(field) - before.get(field, math.nan)

    steps = rise("steps")
    moved = (rise("brought") + rise("promoted")) * value("row_bytes")
    figures = {
        "steps_per_second": _ratio(steps, seconds),
        "repaired_share": _ratio(rise("repaired"), steps),
        "streamed_share": _ratio(rise("streamed"), steps),
        "passes_per_step": _ratio(rise("passes"), steps),
        "hit_rate": 1 - _ratio(rise("missed"), rise("wanted")),
        "misses_per_step": _ratio(rise("missed"), steps),
        "moved_bytes_per_second": _ratio(moved, seconds),
        "stall_ms_per_step": 1000 * _ratio(rise("stall_seconds"), steps),
        "coverage": value("coverage"),
        "arena_hit_rate": _ratio(rise("hits"), rise("hits") + rise("misses")),
        "read_bytes_per_second": _ratio(rise("bytes_read"), seconds),
    }
    totals = {
        "failed_steps": value("failed"),
        "degraded_steps": value("degraded"),
        "slots": value("slots"),
        "resident": value("resident"),
        "read_errors": value("io_errors"),
        "checksum_errors": value("checksum_errors"),
    }
    shown: dict[str, Any] = {name: _figure(number) for name, number in figures.items()}
    shown |= {name: _whole(number) for name, number in totals.items()}
    return RankRates(rank=rank, **shown)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _figure(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _whole(number: float) -> int | None:
    return round(number) if math.isfinite(number) else None
