"""Whether drafts pay: what a token costs with them and without, measured while serving.

A step that verifies drafts has more rows, which are routed to more experts. Where those have to be
brought, the step may take longer than the accepted drafts save. Both ways are measured: now and
then a few steps run the other way. Nothing here knows of models or clocks.
"""

from collections import deque
from typing import Literal

__all__ = ["DraftSwitch", "Way"]

Way = Literal["drafts", "none"]

WINDOW = 16
"""Steps of a measurement; as many of the usual way are compared with as many of the other."""

SETTLE = 4
"""Steps of a trial before those that count: the experts of the former way leave the pool."""

MARGIN = 0.1
"""By what share the other way must be cheaper for a change, so that noise changes nothing."""

FIRST_PAUSE, LONGEST_PAUSE = 128, 8192
"""Steps between two trials of the other way; doubled whenever a trial changes nothing."""


class DraftSwitch:
    """Says for each step whether it is to verify drafts.

    Attributes:
        way: How steps run between trials.
        changes: How often it changed.
        cost: Seconds a token and request of the last measurement, by way.
    """

    def __init__(self) -> None:
        self.way: Way = "drafts"
        self.changes = 0
        self.cost: dict[Way, float] = {}
        self._trial = False
        self._pause = FIRST_PAUSE
        self._left = FIRST_PAUSE
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    @property
    def wanted(self) -> Way:
        """How the next step is to run."""
        return self.way if not self._trial else _other(self.way)

    def step_ended(self, way: Way, seconds: float, tokens: float) -> None:
        """Note a step of decoding alone.

        Args:
            way: How it ran; steps that were on their way when `wanted` changed are left out.
            seconds: Time it took.
            tokens: Tokens that it gave each request, on average.
        """
        if way != self.wanted:
            return
        self._left -= 1
        self._steps.append((seconds, tokens))
        if self._left > 0:
            return
        self._measure()
        if self._trial:
            self._judge()
        else:
            self._trial, self._left = True, SETTLE + WINDOW

    def _measure(self) -> None:
        tokens = sum(tokens for _, tokens in self._steps)
        if tokens:
            self.cost[self.wanted] = sum(seconds for seconds, _ in self._steps) / tokens
        self._steps.clear()

    def _judge(self) -> None:
        other = _other(self.way)
        costs = self.cost.get(other), self.cost.get(self.way)
        if costs[0] is not None and costs[1] is not None and costs[0] < costs[1] * (1 - MARGIN):
            self.way = other
            self.changes += 1
            self._pause = FIRST_PAUSE
        else:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._trial, self._left = False, self._pause


def _other(way: Way) -> Way:
    return "none" if way == "drafts" else "drafts"
