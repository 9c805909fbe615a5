"""Reads the logits of the rows that a step will sample, before vLLM does, for the gate."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from moet_core.gate import Reading, Signal, confidence, emitted_rows

__all__ = ["SampledRows", "reading_of"]


class SampledRows:
    """Knows which rows of a step's output will be sampled, and keeps their logits for vLLM.

    vLLM computes them again right after the pass; what was computed here is handed to it instead.

    Args:
        runner: vLLM's model runner.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._rows: Tensor | None = None
        self._speculation: Any = None
        self._logits: Tensor | None = None
        self._is_kept = False
        self._prepare = runner._prepare_inputs
        self._compute = runner.model.compute_logits
        runner._prepare_inputs = self._note_rows
        runner.model.compute_logits = self._compute_logits

    def read(self, signal: Signal, output: Any) -> Reading | None:
        """Compute the logits of a pass's output and read them; None on ranks that have none."""
        hidden = output[0] if isinstance(output, tuple) else output
        if self._rows is None or not isinstance(hidden, Tensor):
            return None
        self._logits = self._compute(hidden[self._rows])
        self._is_kept = True
        if self._logits is None:
            return None
        # Only greedy sampling stops at the first draft that is not the most probable token.
        greedy = self._runner.input_batch.sampling_metadata.all_greedy
        return reading_of(signal, self._logits, self._drafts() if greedy else None)

    def _note_rows(self, *args: Any, **kwargs: Any) -> Any:
        prepared = self._prepare(*args, **kwargs)
        self._rows, self._speculation = prepared
        self._is_kept = False
        return prepared

    def _drafts(self) -> list[list[int]]:
        """Return the draft tokens of each request."""
        if self._speculation is None:
            return [[] for _ in range(self._runner.input_batch.num_reqs)]
        tokens = iter(self._speculation.draft_token_ids.tolist())
        counts = self._speculation.num_draft_tokens
        return [[next(tokens) for _ in range(count)] for count in counts]

    def _compute_logits(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_kept:
            return self._compute(*args, **kwargs)
        logits, self._logits, self._is_kept = self._logits, None, False
        return logits


def reading_of(signal: Signal, logits: Tensor, drafts: list[list[int]] | None) -> Reading:
    """Read logits [rows, vocabulary] of a step.

    Args:
        signal: What tells how certain a row is.
        logits: One row for each token that may be sampled.
        drafts: Draft tokens of each request, where greedy sampling verifies them; None counts
            every row.
    """
    # Few kernels, and one copy, which is a wait: the device does nothing else meanwhile.
    if signal == "margin":
        top = logits.float().topk(2, dim=-1)
        largest, second, token = top.values[:, 0], top.values[:, 1], top.indices[:, 0]
    else:
        largest, token = torch.log_softmax(logits, -1, dtype=torch.float32).max(dim=-1)
        second = largest  # no part of that signal
    # As bits, for float32 would round ids.
    found = torch.stack((largest.view(torch.int32), second.view(torch.int32), token.int()))
    read = found.cpu().numpy()
    first, other = read[:2].view(np.float32)
    tokens = read[2].astype(np.int64)
    counts = np.ones(len(tokens), bool) if drafts is None else emitted_rows(tokens, drafts)
    return Reading(confidence(signal, first, other, np.zeros_like(first)), tokens, counts)
