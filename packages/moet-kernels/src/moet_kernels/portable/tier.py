"""Encoded experts as the kernels see them."""

from typing import Any, NamedTuple

from torch import Tensor

from moet_core.row import RowLayout

__all__ = ["Tier"]


class Tier(NamedTuple):
    """Encoded experts: rows uint8 [slots, row_bytes] and the slot int32 [E] of each, -1 if none."""

    pool: Tensor
    slot_of: Tensor
    layout: RowLayout

    @property
    def constants(self) -> tuple[Any, ...]:
        """What kernels know of rows when they are compiled."""
        layout = self.layout
        return (
            layout.codec,
            layout.row_bytes,
            layout.codes13.offset,
            layout.scales13.offset,
            layout.codes2.offset,
            layout.scales2.offset,
            layout.tensor_scales.offset,
        )
