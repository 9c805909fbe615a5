"""What quantisation does to a model: plain functions of what servers report."""

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["bits_per_byte", "coarse_kl", "loops"]

# A reply loops if it ends with at least so many copies of one piece.
LOOP_COPIES, LOOP_PIECE, LOOP_LENGTH = 6, 80, 24
_LOOP = re.compile(rf"(.{{1,{LOOP_PIECE}}}?)\1{{{LOOP_COPIES - 1},}}$", re.DOTALL)
_SMALLEST = 1e-9  # probabilities reported as 0 or above 1 by rounding stay inside (0, 1)


def coarse_kl(
    native_ids: NDArray[Any], native: NDArray[Any], ids: NDArray[Any], other: NDArray[Any]
) -> NDArray[np.float64]:
    """Return the KL divergence of `other` from `native` at each position, in nats.

    Only the tokens that both lists name are told apart, the rest counts as one outcome. Merging
    outcomes never raises a KL divergence, so this is a lower bound, and close to the truth where
    the lists hold nearly all of the probability.

    Args:
        native_ids: int `[T, K]`, the most likely tokens of the reference, no token twice in a row.
        native: float `[T, K]`, their log-probabilities.
        ids: int `[T, L]`, the same of the model that is judged.
        other: float `[T, L]`.

    Returns:
        float64 `[T]`, none below 0.
    """
    same = native_ids[:, :, None] == ids[:, None, :]
    shared = same.any(2)
    p = np.where(shared, np.exp(native.astype(np.float64)), 0.0)
    position = same.argmax(2)
    log_q = np.take_along_axis(other.astype(np.float64), position, axis=1)
    rest_p = np.clip(1 - p.sum(1), _SMALLEST, 1)
    rest_q = np.clip(1 - np.where(shared, np.exp(log_q), 0.0).sum(1), _SMALLEST, 1)
    told_apart = np.where(shared, p * (native - log_q), 0.0).sum(1)
    return np.maximum(told_apart + rest_p * np.log(rest_p / rest_q), 0.0)


def bits_per_byte(log_probabilities: NDArray[Any], text_bytes: int) -> float:
    """Return the code length of a text in bits a byte, from natural log-probabilities."""
    return float(-log_probabilities.astype(np.float64).sum() / math.log(2) / text_bytes)


def loops(text: str) -> bool:
    """Tell whether a reply ends in repetitions: 6 copies or more, 24 characters or more."""
    found = _LOOP.search(text)
    return found is not None and len(found[0]) >= LOOP_LENGTH
