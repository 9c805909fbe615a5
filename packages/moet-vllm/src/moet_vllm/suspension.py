"""Suspends drafts while they cost more than they bring: the scheduler's side of `DraftSwitch`.

Suspended drafts are made and not scheduled, so that no step verifies them. The drafter runs on,
which keeps its KV cache complete; vLLM's own way to ask for no drafts fails on a CPU. What is not
scheduled no rank sees, so that all agree.
"""

import functools
import time
from typing import Any, NamedTuple

from prometheus_client import Counter, Gauge
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from moet_core.drafts import DraftSwitch, Way
from moet_core.errors import ConfigError
from moet_vllm.config import parse_config

__all__ = ["DraftSuspension", "make_suspension"]

logger = init_logger("vllm.moet")


class Metrics(NamedTuple):
    """What is shown on vLLM's /metrics."""

    suspended: Gauge
    changes: Counter
    cost: Gauge


@functools.cache
def metrics() -> Metrics:
    """Return the metrics of this process: two engines in it share them."""
    return Metrics(
        Gauge(
            "moet_drafts_suspended",
            "1 while drafts are suspended, trials apart.",
            multiprocess_mode="mostrecent",
        ),
        Counter("moet_draft_changes", "Times that drafts were suspended or resumed."),
        Gauge(
            "moet_draft_seconds_per_token",
            "Seconds a token and request, as measured last, with drafts or with none.",
            ["way"],
            multiprocess_mode="mostrecent",
        ),
    )


class DraftSuspension:
    """Measures the steps of one scheduler and says whether the next one drafts."""

    def __init__(self) -> None:
        self.switch = DraftSwitch()
        self._last_end = 0.0
        self._metrics = metrics()
        self._metrics.suspended.set(0)

    @property
    def drops(self) -> bool:
        """Whether drafts made now are to be dropped."""
        return self.switch.wanted == "none"

    def scheduled(self, step: SchedulerOutput) -> None:
        """Note when a step was scheduled."""
        vars(step)["moet_scheduled"] = time.monotonic()

    def ended(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Note what a step took and gave."""
        now = time.monotonic()
        # A step that was scheduled while another one ran began when that one ended.
        seconds = now - max(self._last_end, vars(step)["moet_scheduled"])
        self._last_end = now
        way = _way(step)
        if way is None:
            return
        sampled = output.sampled_token_ids
        before = self.switch.way
        tokens = sum(len(tokens) for tokens in sampled) / max(len(sampled), 1)
        self.switch.step_ended(way, seconds, tokens)
        for measured, cost in self.switch.cost.items():
            self._metrics.cost.labels(way=measured).set(cost)
        if self.switch.way != before:
            self._report()

    def _report(self) -> None:
        suspended = self.switch.way == "none"
        self._metrics.suspended.set(suspended)
        self._metrics.changes.inc()
        logger.info(
            "moet: drafts are %s: a token takes %.1f ms with them and %.1f ms without",
            "suspended" if suspended else "resumed",
            1000 * self.switch.cost["drafts"],
            1000 * self.switch.cost["none"],
        )


def make_suspension(vllm_config: VllmConfig) -> DraftSuspension | None:
    """Return what suspends the drafts of a scheduler; None if nothing is to.

    Raises:
        ConfigError: There are no drafts.
    """
    settings: dict[str, Any] = vllm_config.additional_config.get("moet", {})
    if not parse_config(settings).suspend_drafts:
        return None
    if vllm_config.speculative_config is None:
        raise ConfigError(
            "suspend_drafts=true has no effect without drafts: set speculative_tokens, or leave it "
            "out."
        )
    return DraftSuspension()


def _way(step: SchedulerOutput) -> Way | None:
    """Tell how a step ran; None if it did anything but decode, or some requests had no drafts."""
    drafts = step.scheduled_spec_decode_tokens
    counts = step.num_scheduled_tokens
    if not counts or any(n != 1 + len(drafts.get(name, ())) for name, n in counts.items()):
        return None
    if step.scheduled_new_reqs or 0 < len(drafts) < len(counts):
        return None
    return "drafts" if drafts else "none"
