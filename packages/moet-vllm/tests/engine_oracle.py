"""Compares the greedy answers of two engines."""

from typing import Any

import msgspec

NEAR_TIE_NATS = 0.05
LOGPROB_TOLERANCE = 2e-2


class Comparison(msgspec.Struct, frozen=True):
    """How two engines' answers to the same prompts compare.

    Attributes:
        faults: what differs beyond the tolerances.
        near_ties: where an answer left the other's path because its two best tokens were within
            `NEAR_TIE_NATS`; what follows there is another text and is not compared.
        compared: positions whose tokens and log probabilities were compared.
        largest: the largest difference in log probability over those.
    """

    faults: list[str]
    near_ties: list[str]
    compared: int
    largest: float


def compare(
    wanted: list[dict[str, Any]], got: list[dict[str, Any]], tolerance: float = LOGPROB_TOLERANCE
) -> Comparison:
    """Compare two lists of answers (see engine_job.py), position by position."""
    faults: list[str] = []
    near_ties: list[str] = []
    compared, largest = 0, 0.0
    for prompt, (a, b) in enumerate(zip(wanted, got, strict=True)):
        steps = zip(a["tokens"], a["logprobs"], b["tokens"], b["logprobs"], strict=True)
        for position, (token, logprobs, other, other_logprobs) in enumerate(steps):
            where = f"prompt {prompt}, position {position}"
            best, second = logprobs[str(token)], logprobs.get(str(other))
            if token != other:
                if second is None or best - second >= NEAR_TIE_NATS:
                    faults.append(f"{where}: wanted token {token}, got {other}, no near tie")
                else:
                    near_ties.append(f"{where}: {token} over {other} by {best - second:.4f} nat")
                break
            delta = abs(best - other_logprobs[str(token)])
            compared, largest = compared + 1, max(largest, delta)
            if delta > tolerance:
                faults.append(f"{where}: log probability differs by {delta:.4f}")
    return Comparison(faults, near_ties, compared, largest)
