"""The device's part of residency: slots of rows, the slot table and the marks of what was wanted.

Rows arrive on a stream of their own where the device has streams. The tables are written by the
step loop alone, between forward passes. All memory that a captured CUDA graph reads or writes is
allocated here, once.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet_vllm.residency.copies import Copies, Moment

__all__ = ["Look", "SlotPool"]

Look = Callable[[NDArray[np.bool_]], None]
"""Is shown the marks, bool [layers, experts], that a pass has set so far."""

MIN_PAUSE, MAX_PAUSE = 2e-4, 2e-3
"""Seconds between two looks, of which one takes a tenth of the shorter."""


class SlotPool:
    """Slots for the working set, and behind them a ring for rows that are used once.

    What a pass was routed to is either marked by the kernels, in `wanted`, or recorded row by row
    with `record`. A recorded pass may end in rows of padding, which are no part of the marks, and
    it needs one small kernel a layer, behind those of the experts instead of in front of them.

    Args:
        slots: Slots of the working set.
        ring: Slots behind them.
        row_bytes: Bytes of a slot.
        layers: Layers with routed experts.
        experts: Experts of each.
        device: Where the pool lies.
        recorded: Rows at most of a pass that is recorded.
        top_k: Experts that a row is routed to; of use for recorded passes alone.

    Attributes:
        rows: uint8 [slots + ring, row_bytes].
        slot_of: int32 [layers, experts], the slot of each expert or -1; a copy of the policy's.
        wanted: uint8 [layers, experts], 1 for what the forward passes since `clear_wanted` were
            routed to.
        copies: Brings rows into the slots.
    """

    def __init__(
        self,
        *,
        slots: int,
        ring: int,
        row_bytes: int,
        layers: int,
        experts: int,
        device: torch.device,
        recorded: int = 0,
        top_k: int = 0,
    ) -> None:
        self.slots = slots
        self.ring = ring
        self.rows = torch.empty(slots + ring, row_bytes, dtype=torch.uint8, device=device)
        self.slot_of = torch.full((layers, experts), -1, dtype=torch.int32, device=device)
        # One mark more than there are experts: that of records that were not made.
        self._all_marks = torch.zeros(layers * experts + 1, dtype=torch.uint8, device=device)
        self.wanted = self._all_marks[:-1].view(layers, experts)
        self._records = torch.full((recorded, layers, top_k), layers * experts, device=device)
        self._tokens = 0
        self.copies = Copies(device)
        self._usual_wait = 0.0  # seconds
        self._looks = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pins = device.type == "cuda"
        self._marks, self._so_far = (
            torch.zeros(layers, experts, dtype=torch.uint8, pin_memory=self._pins) for _ in range(2)
        )
        self._all_so_far = torch.zeros_like(self._all_marks)
        # One more than there are experts: -1, which stands for no expert, is the last one.
        self._routed = torch.zeros(experts + 1, dtype=torch.uint8, device=device)
        self._routed_marks = torch.zeros(experts, dtype=torch.uint8, pin_memory=self._pins)

    @property
    def device_bytes(self) -> int:
        """Memory of the device that the pool holds."""
        marks = 2 * self._all_marks.nbytes + self._records.nbytes + self._routed.nbytes
        return self.rows.nbytes + self.slot_of.nbytes + marks

    @property
    def recorded(self) -> int:
        """Rows at most of a pass that is recorded."""
        return len(self._records)

    def place(self, slot: int, row: memoryview) -> int:
        """Start to copy a row into a slot; returns the copy's number."""
        return self.copies.start(self.rows[slot], row)

    def open_slots(self) -> None:
        """Let copies begin only after the passes that may still read the slots."""
        self.copies.hold_for(self.copies.now())

    def set_table(self, slot_of: NDArray[np.int32]) -> None:
        """Replace the slot table; copies into the slots that it names are done."""
        self.slot_of.copy_(self._host(slot_of), non_blocking=True)

    def table(self, experts: list[int], slots: NDArray[np.int32]) -> Tensor:
        """Return a slot table of a few experts alone, int32 [E]; waits for nothing."""
        table = np.full(self.slot_of.shape[1], -1, np.int32)
        table[experts] = slots
        return self._host(table).to(self.copies.device, non_blocking=True)

    def clear_wanted(self, tokens: int = 0) -> None:
        """Forget the marks and records of former passes.

        Args:
            tokens: Rows of the next pass that are tokens; those behind them count for nothing if
                the pass is recorded.
        """
        self._all_marks.zero_()
        self._tokens = min(tokens, self.recorded)
        if self._tokens:
            self._records[: self._tokens].fill_(self.wanted.numel())
        self.copies.now().hold(self._looks)

    def record(self, layer: int, topk_ids: Tensor) -> None:
        """Keep what the rows of a pass are routed to in a layer.

        Args:
            layer: Number of the layer.
            topk_ids: int32 or int64 [T, k]; T at most `recorded`.
        """
        target = self._records[: len(topk_ids), layer]
        torch.add(topk_ids, layer * self.wanted.shape[1], out=target)

    def take_wanted(self, look: Look | None = None) -> NDArray[np.bool_]:
        """Return the marks, bool [layers, experts]; waits for the passes that set them.

        Args:
            look: Called with what is marked already, now and then while the pass runs, as long as
                that is unlikely to delay the end of the wait. Marks only come, so that these are
                some of the final ones.
        """
        begun = time.perf_counter()
        self._add_records(self._all_marks)
        self._marks.copy_(self.wanted, non_blocking=True)
        moment = Moment(self.copies.computing())
        if look is None:
            moment.wait()
        else:
            self._look_until(moment, look, begun)
            self._usual_wait = time.perf_counter() - begun
        return self._marks.numpy().astype(bool)

    def _look_until(self, moment: Moment, look: Look, begun: float) -> None:
        """Wait for a moment, with looks before the time at which it usually comes."""
        pause = min(max(MIN_PAUSE, self._usual_wait / 16), MAX_PAUSE)
        until = begun + 0.85 * self._usual_wait - 2 * pause
        while time.perf_counter() < until and self._looks is not None:
            time.sleep(pause)
            if moment.has_passed:
                break
            look(self._marked_so_far(self._looks))
        moment.wait()

    def _marked_so_far(self, stream: torch.cuda.Stream) -> NDArray[np.bool_]:
        """Copy the marks beside the pass that sets them."""
        with torch.cuda.stream(stream):
            self._all_so_far.copy_(self._all_marks)
            self._add_records(self._all_so_far)
            so_far = self._all_so_far[:-1].view_as(self.wanted)
            self._so_far.copy_(so_far, non_blocking=True)
        Moment(stream).wait()
        return self._so_far.numpy().astype(bool)

    def _add_records(self, marks: Tensor) -> None:
        """Set the marks, uint8 [layers * experts + 1], of what is recorded of the pass's tokens."""
        if self._tokens:
            marks.index_fill_(0, self._records[: self._tokens].view(-1), 1)

    def mark(self, layer: int, topk_ids: Tensor) -> list[int]:
        """Mark a layer's experts as wanted and return them, ascending; waits for their routing.

        Args:
            layer: Number of the layer.
            topk_ids: integer [T, k]; -1 is no expert.
        """
        self._routed.zero_()
        index = topk_ids.reshape(-1).long()
        index = torch.where(index < 0, len(self._routed) - 1, index)
        # Assigning to an index would copy the 1 from pageable memory, which stops the host.
        self._routed.index_fill_(0, index, 1)
        self.wanted[layer].copy_(self._routed[:-1])
        return np.flatnonzero(self._read(self._routed[:-1], self._routed_marks)).tolist()

    def row(self, slot: int) -> memoryview:
        """Return a copy of a slot's bytes, for checks."""
        return memoryview(self.rows[slot].cpu().numpy().tobytes())

    def _host(self, array: NDArray[np.int32]) -> Tensor:
        """Return a copy of an array that the device can read at its own time."""
        copy = torch.from_numpy(array.copy())
        return copy.pin_memory() if self._pins else copy

    def _read(self, marks: Tensor, into: Tensor) -> NDArray[np.bool_]:
        """Copy marks to the host and wait for them."""
        into.copy_(marks, non_blocking=True)
        Moment(self.copies.computing()).wait()
        return into.numpy().astype(bool)
