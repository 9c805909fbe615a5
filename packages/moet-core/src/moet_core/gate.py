"""The confidence gate: which steps run again with experts at the checkpoint's precision.

A step whose next token is uncertain is worth a second, finer pass. The gate reads the logits of
the rows that will be sampled, and fires if the least certain of them is at or below a threshold.
Nothing here moves bytes or runs a model.
"""

import random
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from moet_core.errors import ConfigError

__all__ = [
    "Gate",
    "GateChange",
    "GateCounts",
    "GateSettings",
    "Reading",
    "Signal",
    "changed",
    "confidence",
    "emitted_rows",
    "options",
]

Signal = Literal["max_prob", "margin"]


class GateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """When the gate fires, and what a fire may cost.

    Attributes:
        signal: `max_prob`, the largest softmax probability, or `margin`, the difference of the two
            largest logits in nats.
        tau: Threshold. At or below it the gate fires: with `max_prob`, 1 always fires and 0 never.
        budget: Experts that one step may promote; 0 for any number.
        passes: Finer passes of one step; 0 for as many as it takes until every expert that the
            step is routed to is fine.
        audit: Probability that a step which would not fire does so all the same, so that what the
            gate lets through can be estimated without bias.
    """

    signal: Signal = "max_prob"
    tau: float = 0.6
    budget: int = 0
    passes: int = 3
    audit: float = 0.0


class GateChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of the settings can be replaced while serving, named as the options; None leaves it.

    Attributes:
        tau: See `GateSettings`.
        gate_budget: `GateSettings.budget`.
    """

    tau: Annotated[float, msgspec.Meta(ge=0)] | None = None
    gate_budget: Annotated[int, msgspec.Meta(ge=0)] | None = None


class GateCounts(msgspec.Struct):
    """Running totals.

    Attributes:
        checked: Steps whose confidence was read.
        fires: Steps that ran again because of it.
        audits: Steps that ran again by chance.
        promoted: Experts brought to the fine tier by fires and audits.
        passes: Finer passes.
        flipped: Fires after which a row that will be sampled had another most probable token.
        audit_flipped: The same of audits: what the gate would have missed.
        seconds: Time that finer passes took, reads included.
    """

    checked: int = 0
    fires: int = 0
    audits: int = 0
    promoted: int = 0
    passes: int = 0
    flipped: int = 0
    audit_flipped: int = 0
    seconds: float = 0.0


class Reading(msgspec.Struct, frozen=True):
    """What the logits of a step say, row by row.

    Attributes:
        confidence: float [rows], in the signal's unit.
        token: int [rows], the most probable token.
        counts: bool [rows], whether the row can be emitted; see `emitted_rows`.
    """

    confidence: NDArray[np.floating]
    token: NDArray[np.integer]
    counts: NDArray[np.bool_]


def changed(settings: GateSettings, change: GateChange) -> GateSettings:
    """Return settings with a change.

    Raises:
        ConfigError: A probability above 1.
    """
    tau = settings.tau if change.tau is None else change.tau
    if settings.signal == "max_prob" and tau > 1:
        raise ConfigError(
            f"tau={tau} is no probability: with gate=max_prob it is at most 1, which fires at "
            "every step."
        )
    budget = settings.budget if change.gate_budget is None else change.gate_budget
    return msgspec.structs.replace(settings, tau=tau, budget=budget)


def options(settings: GateSettings) -> dict[str, str | float]:
    """Return what `GateChange` may replace, and the signal, by the names of the options."""
    return {"gate": settings.signal, "tau": settings.tau, "gate_budget": settings.budget}


def confidence(
    signal: Signal,
    largest: NDArray[np.floating],
    second: NDArray[np.floating],
    log_sum: NDArray[np.floating],
) -> NDArray[np.floating]:
    """Return each row's confidence, float [rows].

    Args:
        signal: Which one.
        largest: The largest logit.
        second: The second largest logit.
        log_sum: Logarithm of the sum of exp(logit).
    """
    if signal == "margin":
        return largest - second
    return np.exp(np.minimum(largest - log_sum, 0.0))


def emitted_rows(token: NDArray[np.integer], drafts: Sequence[Sequence[int]]) -> NDArray[np.bool_]:
    """Tell which rows of a verification step greedy sampling can emit, bool [rows].

    A request with drafts d1..dk has k + 1 rows. The first always counts; the row behind draft di
    counts only if d1..di are what the rows before them say: else it is never reached.

    Args:
        token: The most probable token of each row, all requests one after the other.
        drafts: Draft tokens of each request, empty without speculation.

    Raises:
        ValueError: The rows are not one more than the drafts of each request.
    """
    wanted = sum(len(part) + 1 for part in drafts)
    if len(token) != wanted:
        raise ValueError(f"wanted {wanted} rows for {len(drafts)} requests, got {len(token)}")
    counts = np.zeros(len(token), bool)
    row = 0
    for part in drafts:
        counts[row] = True
        for position, draft in enumerate(part):
            if token[row + position] != draft:
                break
            counts[row + position + 1] = True
        row += len(part) + 1
    return counts


class Gate:
    """Decides, and counts what came of it.

    Args:
        settings: May be replaced between steps; see `changed`.
        seed: Seed of the audits.
    """

    def __init__(self, settings: GateSettings, seed: int = 0) -> None:
        self.settings = settings
        self.counts = GateCounts()
        self._random = random.Random(seed)  # noqa: S311 (chooses samples, hides nothing)

    def decide(self, reading: Reading) -> Literal["pass", "fire", "audit"]:
        """Say what becomes of a step with this reading."""
        self.counts.checked += 1
        seen = reading.confidence[reading.counts]
        # A row without a number is as uncertain as can be.
        if len(seen) and not (np.nan_to_num(seen, nan=-np.inf) > self.settings.tau).all():
            return "fire"
        if self.settings.audit and self._random.random() < self.settings.audit:
            return "audit"
        return "pass"

    def ended(
        self, decision: Literal["fire", "audit"], before: Reading, after: Reading, seconds: float
    ) -> None:
        """Count a step that ran again.

        Args:
            decision: Why it did.
            before: What its logits said at first.
            after: What they said in the end.
            seconds: Time the finer passes took.
        """
        flipped = bool((before.token != after.token)[before.counts].any())
        self.counts.seconds += seconds
        if decision == "fire":
            self.counts.fires += 1
            self.counts.flipped += flipped
        else:
            self.counts.audits += 1
            self.counts.audit_flipped += flipped
