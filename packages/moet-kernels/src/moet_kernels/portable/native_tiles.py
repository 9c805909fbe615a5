"""Loading and launching the CUDA kernels of prefill, which only sm_90 runs."""

import functools
from pathlib import Path

import torch
from torch import Tensor

from moet_core.row import RowLayout
from moet_kernels import arch
from moet_kernels.portable.module import Module, index_of, loaded
from moet_kernels.portable.native import FOLDER
from moet_kernels.portable.tier import Tier
from moet_kernels.portable.tile_cuts import (
    TILE_CUTS,
    TileCut,
    pack_order,
    pack_tiles,
    tile_cut,
)

__all__ = ["CutsOfTiers", "Tiles", "cubin_path", "cuts_for", "tiles_for"]

CutsOfTiers = dict[str, tuple[TileCut, TileCut]]
"""By codec, the kernels for gate-up and for down."""

_ORDER_COLUMNS = 128 * 32
"""Columns that a block of `order` writes."""


def cubin_path(folder: Path = FOLDER) -> Path:
    """Where the machine code lies."""
    return folder / "tiles.sm_90a.cubin"


def cuts_for(
    pairs: int, experts: int, base: RowLayout, fine: RowLayout | None
) -> CutsOfTiers | None:
    """Choose the kernels for a number of pairs; None if a tier's sizes have none.

    Both tiers' groups are of the same number of vectors.
    """
    found: CutsOfTiers = {}
    for layout in (base, fine) if fine else (base,):
        gate_up, down = (tile_cut(layout, pairs, experts, down=down) for down in (False, True))
        if gate_up is None or down is None:
            return None
        found[layout.codec] = gate_up, down
    return found


class Tiles(Module):
    """The CUDA kernels of prefill on one device; see `Module`."""

    def __init__(self, device: torch.device, image: bytes) -> None:
        names = [cut.name for cut in TILE_CUTS]
        super().__init__(device, image, [*names, "order"], overlap=False)
        for cut in TILE_CUTS:
            self.allow_shared(cut.name, cut.shared_bytes)

    def ordered(self, x: Tensor, codec: str) -> Tensor:
        """Return x bfloat16 [T, H] with columns in the order of decoded weights (`place_of`)."""
        if x.data_ptr() % 16:
            x = x.clone()
        out = torch.empty_like(x)
        grid = len(x), -(-x.shape[1] // _ORDER_COLUMNS)  # the second is at most 65535
        packed = pack_order(x.data_ptr(), out.data_ptr(), x.shape[1], codec)
        self.launch("order", grid, 128, packed)
        return out

    def add_parts(
        self,
        parts: Tensor,
        x: Tensor,
        top_k: int,
        groups: tuple[Tensor, Tensor],
        cuts: CutsOfTiers,
        base: Tier,
        fine: Tier | None,
        swiglu_limit: float,
    ) -> None:
        """Set the rows of parts float32 [T * k, H] whose expert is present.

        Args:
            parts: Of each pair.
            x: bfloat16 [T, H].
            top_k: Pairs of a token.
            groups: `order` and `expert_of` of `grouping.sort`, in groups of the cuts' vectors.
            cuts: From `cuts_for`.
            base: Tier of experts that are not in `fine`.
            fine: Tier that is preferred where it has an expert, or None.
            swiglu_limit: 0 for none.
        """
        shape = len(parts), base.layout.intermediate
        activated = torch.empty(shape, dtype=torch.bfloat16, device=x.device)
        tiers = [(base, fine), (fine, None)] if fine is not None else [(base, None)]
        vectors = {codec: self.ordered(x, codec) for codec in cuts}
        for tier, preferred in tiers:
            gate_up, down = cuts[tier.layout.codec]
            of_x = vectors[tier.layout.codec]
            self._tiles(gate_up, of_x, activated, top_k, groups, tier, preferred, swiglu_limit)
            self._tiles(down, activated, parts, 1, groups, tier, preferred, 0.0)

    def _tiles(
        self,
        cut: TileCut,
        x: Tensor,
        out: Tensor,
        top_k: int,
        groups: tuple[Tensor, Tensor],
        tier: Tier,
        preferred: Tier | None,
        swiglu_limit: float,
    ) -> None:
        layout, (order, expert_of) = tier.layout, groups
        k, rows, codes, scales = layout.hidden, layout.intermediate, layout.codes13, layout.scales13
        if cut.down:
            k, rows, codes, scales = rows, k, layout.codes2, layout.scales2
        tensors = (x, order, expert_of, tier.pool, tier.slot_of)
        pointers = [t.data_ptr() for t in tensors]
        pointers += [preferred.slot_of.data_ptr() if preferred else 0, out.data_ptr()]
        numbers = (top_k, k, rows, codes.offset, scales.offset, layout.tensor_scales.offset)
        packed = pack_tiles(pointers, layout.row_bytes, numbers, swiglu_limit)
        grid = rows // cut.tile_rows, len(expert_of)
        self.launch(cut.name, grid, cut.threads, packed, shared=cut.shared_bytes)


def tiles_for(device: torch.device) -> Tiles | None:
    """Return the CUDA kernels of prefill for a device, None where Triton's compute.

    Where they should load and do not, one warning says why.
    """
    if not arch.runs_sm90(device):
        return None
    return _loaded(index_of(device))


@functools.cache
def _loaded(index: int) -> Tiles | None:
    return loaded("prefill", index, lambda device: Tiles(device, cubin_path().read_bytes()))
