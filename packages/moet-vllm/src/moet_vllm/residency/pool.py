"""The device's part of residency: slots of rows, the slot table and the marks of what was wanted.

Rows arrive on a stream of their own where the device has streams. The tables are written by the
step loop alone, between forward passes.
"""

import contextlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["SlotPool"]


class SlotPool:
    """Slots for the working set, and behind them a ring for rows that are used once.

    Attributes:
        rows: uint8 [slots + ring, row_bytes].
        slot_of: int32 [layers, experts], the slot of each expert or -1; a copy of the policy's.
        wanted: uint8 [layers, experts], 1 for what the forward passes since the last reset
            were routed to.
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
    ) -> None:
        self.slots = slots
        self.ring = ring
        self.rows = torch.empty(slots + ring, row_bytes, dtype=torch.uint8, device=device)
        self.slot_of = torch.full((layers, experts), -1, dtype=torch.int32, device=device)
        self.wanted = torch.zeros(layers, experts, dtype=torch.uint8, device=device)
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def place(self, slot: int, row: memoryview) -> None:
        """Start to copy a row into a slot; `settle` waits for it."""
        source = torch.frombuffer(row, dtype=torch.uint8)
        with self._on_copy_stream():
            self.rows[slot].copy_(source, non_blocking=True)

    def settle(self) -> None:
        """Wait until the rows that were placed are there."""
        if self._copies is not None:
            self._copies.synchronize()

    def open_slots(self) -> None:
        """Let copies begin only after the passes that may still read the slots."""
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream(self.rows.device))

    def set_table(self, slot_of: NDArray[np.int32]) -> None:
        """Replace the slot table; the rows it names must have settled."""
        self.slot_of.copy_(torch.tensor(slot_of))

    def take_wanted(self) -> NDArray[np.bool_]:
        """Return the marks, bool [layers, experts], and clear them; waits for the device."""
        marks = self.wanted.cpu().numpy().astype(bool)
        self.wanted.zero_()
        return marks

    def row(self, slot: int) -> memoryview:
        """Return a copy of a slot's bytes, for checks."""
        return memoryview(self.rows[slot].cpu().numpy().tobytes())

    def _on_copy_stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._copies is None else torch.cuda.stream(self._copies)
