"""Compares the greedy answers of two engines."""

from typing import Any

NEAR_TIE_NATS = 0.05
LOGPROB_TOLERANCE = 2e-2


def differences(wanted: list[dict[str, Any]], got: list[dict[str, Any]]) -> tuple[list[str], float]:
    """Compare two engines' answers to the same prompts, position by position.

    An answer may leave the other's path only where the two best tokens were within
    `NEAR_TIE_NATS`; what follows is another text and is not compared.

    Returns:
        (what differs beyond the tolerances, the largest difference in log probability).
    """
    faults: list[str] = []
    largest = 0.0
    for prompt, (a, b) in enumerate(zip(wanted, got, strict=True)):
        steps = zip(a["tokens"], a["logprobs"], b["tokens"], b["logprobs"], strict=True)
        for position, (token, logprobs, other, other_logprobs) in enumerate(steps):
            where = f"prompt {prompt}, position {position}"
            best, second = logprobs[str(token)], logprobs.get(str(other))
            if token != other:
                if second is None or best - second >= NEAR_TIE_NATS:
                    faults.append(f"{where}: wanted token {token}, got {other}, no near tie")
                break
            delta = abs(best - other_logprobs[str(token)])
            largest = max(largest, delta)
            if delta > LOGPROB_TOLERANCE:
                faults.append(f"{where}: log probability differs by {delta:.4f}")
    return faults, largest
