"""One streamed pass: every layer fetches its absent experts while it computes.

A layer computes with what is in slots while the first of its absent experts are copied into one
half of the ring, then with those while the next are copied into the other half. Reads of the rows
after those go on all the while. The parts of every token are added in the order of its routing,
so that the result has the bits of one computed with all experts present.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from moet_core.errors import MoetError
from moet_kernels.experts import combine_parts
from moet_store import PackError
from moet_vllm.residency.counts import Counts
from moet_vllm.residency.pool import SlotPool
from moet_vllm.residency.ring import Chunk
from moet_vllm.residency.tier import Tier

__all__ = ["LayerStream", "measured_layer"]


class LayerStream:
    """The layers of one streamed pass, in their order.

    Args:
        tier: Brings the experts that are absent.
        finer: A tier whose experts are taken where it has them; None if there is none, or if it
            is the one that brings.
        marks: The pool in which wanted experts are marked.
        counts: Where wanted and missed experts and the time of waiting are counted.

    Attributes:
        failure: Why the pass has no result; None while it may have one.
    """

    def __init__(self, tier: Tier, finer: Tier | None, marks: SlotPool, counts: Counts) -> None:
        self.failure: MoetError | None = None
        self._tier = tier
        self._finer = finer
        self._marks = marks
        self._counts = counts
        self._ahead: Chunk | None = None

    def run_layer(
        self, layer: int, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, limit: float | None
    ) -> Tensor:
        """Run a layer; arguments and result as of `ResidentExperts.run_layer`."""
        tier, finer = self._tier, self._finer
        routed = self._marks.mark(layer, topk_ids)
        absent = self._absent(layer, routed)
        self._counts.wanted += len(routed)
        self._counts.missed += len(absent)
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            absent = [expert for expert in absent if expert not in ahead.experts]
        chunks = [absent[at : at + tier.ring.size] for at in range(0, len(absent), tier.ring.size)]
        if chunks and self.failure is None:
            tier.read_ahead(layer, chunks[0])
        parts = x.new_zeros(topk_ids.numel(), x.shape[1], dtype=torch.float32)
        table = tier.pool.slot_of[layer]
        if finer is not None:
            finer.add(parts, x, topk_ids, finer.pool.slot_of[layer], limit)
            table = table.masked_fill(finer.pool.slot_of[layer] >= 0, -1)
        tier.add(parts, x, topk_ids, table, limit)
        if ahead is not None:
            tier.add_chunk(parts, x, topk_ids, ahead, limit)
        for number, experts in enumerate(chunks):
            if self.failure is None and number + 1 < len(chunks):
                tier.read_ahead(layer, chunks[number + 1])
            chunk = self._start(partial(tier.start_chunk, layer, experts))
            if chunk is None:
                break  # the pass has no result any more; it only has to end
            tier.add_chunk(parts, x, topk_ids, chunk, limit)
        if 2 * len(routed) >= tier.shape.experts:
            self._begin_next(layer + 1)
        return combine_parts(parts, topk_weights, x.dtype)

    def _begin_next(self, layer: int) -> None:
        """Copy the first rows of a layer that will want most of its experts.

        They arrive while the last rows of the layer before it compute.
        """
        if layer < len(self._tier.shape.layers):
            likely = self._absent(layer, range(self._tier.shape.experts))
            first = likely[: self._tier.ring.size]
            self._ahead = self._start(partial(self._tier.start_ready_chunk, layer, first))

    def _absent(self, layer: int, wanted: Iterable[int]) -> list[int]:
        """Return what of a layer's experts must be brought."""
        if self._finer is not None:
            wanted = self._finer.absent(layer, wanted)
        return self._tier.absent(layer, wanted)

    def _start(self, start: Callable[[], Chunk | None]) -> Chunk | None:
        """Start a chunk; None if the pass has failed, now or before."""
        if self.failure is not None:
            return None
        started = time.perf_counter()
        try:
            return start()
        except PackError as error:
            self.failure = error
            return None
        finally:
            self._counts.stall_seconds += time.perf_counter() - started


def measured_layer(
    tiers: list[Tier],
    layer: int,
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    limit: float | None,
) -> Tensor:
    """Run a layer with the device memory of a streamed one, fetching and waiting for nothing."""
    parts = x.new_zeros(topk_ids.numel(), x.shape[1], dtype=torch.float32)
    for tier in tiers:
        tier.add(parts, x, topk_ids, tier.pool.slot_of[layer], limit)
    return combine_parts(parts, topk_weights, x.dtype)
