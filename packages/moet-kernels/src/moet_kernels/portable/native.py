"""Loading and launching the CUDA kernels of a decode step."""

import functools
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from moet_core.row import RowLayout
from moet_kernels import arch
from moet_kernels.portable.cuts import CHUNK, CUTS, Cut, cut_of, limbed_bytes, pack_arguments
from moet_kernels.portable.module import Module, index_of, loaded
from moet_kernels.portable.tier import Tier

__all__ = ["FOLDER", "Native", "native_for", "ptx_path", "takes"]

FOLDER = Path(__file__).parent / "cuda"
VERSIONS = (90, 80)
"""Architectures with PTX of their own, the best first; newer ones run it too."""

_COMBINE_THREADS = 256


def ptx_path(number: int, folder: Path = FOLDER) -> Path:
    """Where the PTX for an architecture lies, 90 for sm_90."""
    return folder / f"stream.sm_{number}.ptx"


def takes(*layouts: RowLayout) -> bool:
    """Whether there are kernels for such rows: both sizes must be multiples of 128."""
    return all(
        layout.hidden % CHUNK == 0 and layout.intermediate % CHUNK == 0 for layout in layouts
    )


class Native(Module):
    """The CUDA kernels on one device; see `Module`.

    Args:
        device: A GPU of sm_80 or newer.
        image: PTX, or a cubin of the device's architecture.
        overlap: Whether a kernel may start before the one in front has ended.
        cuts: Of the kernels in `image`.
    """

    def __init__(
        self, device: torch.device, image: bytes, *, overlap: bool, cuts: Sequence[Cut] = CUTS
    ) -> None:
        names = [*(cut.name for cut in cuts), "limbs", "combine"]
        super().__init__(device, image, names, overlap=overlap)
        self.cuts = cuts
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count

    def add_parts(
        self,
        parts: Tensor,
        x: Tensor,
        topk_ids: Tensor,
        base: Tier,
        fine: Tier | None,
        swiglu_limit: float,
        missing: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> None:
        """Set the rows of parts whose expert is present; see `layer.add_parts`."""
        activated = self.gate_up(x, topk_ids, base, fine, swiglu_limit, missing, wanted)
        self.down(parts, activated, topk_ids, base, fine)

    def gate_up(
        self,
        x: Tensor,
        topk_ids: Tensor,
        base: Tier,
        fine: Tier | None,
        swiglu_limit: float,
        missing: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> list[Tensor]:
        """Return silu(gate(x)) * up(x) of each pair as each tier's `down` takes it.

        That is in limbs (`limbs.cuh`) for w2, else bfloat16 [T * k, I] in `order_of` stream.cuh.
        """
        pairs = topk_ids.numel()
        found: list[Tensor] = []
        in_limbs: Tensor | None = None
        for tier, preferred in _tiers(base, fine):
            after = bool(found)
            if tier.layout.codec == "w2":
                if in_limbs is None:
                    in_limbs = _empty(len(x), x.shape[1], tier, x.device)
                    self.limbs(x, in_limbs)
                    after = True
                vectors = in_limbs
            else:
                vectors = x.clone() if x.data_ptr() % 16 else x
                after = after and vectors is x
            activated = _empty(pairs, tier.layout.intermediate, tier, x.device)
            counters = () if found else (missing, wanted)
            self._stream(
                vectors, activated, topk_ids, tier, preferred, swiglu_limit, *counters, after=after
            )
            found.append(activated)
        return found

    def limbs(self, x: Tensor, out: Tensor) -> None:
        """Write x bfloat16 [T, H] in limbs, uint8 [T, `limbed_bytes`]."""
        packed = struct.pack("<2Qi4x", x.data_ptr(), out.data_ptr(), x.shape[1])
        self.launch("limbs", (x.shape[1] // CHUNK, len(x)), CHUNK, packed)

    def down(
        self,
        parts: Tensor,
        activated: list[Tensor],
        topk_ids: Tensor,
        base: Tier,
        fine: Tier | None,
    ) -> None:
        """Set the rows of parts float32 [T * k, H] whose expert is present.

        Args:
            parts: Of each pair.
            activated: What `gate_up`, which must be in front on this stream, returned.
            topk_ids: Expert of each pair.
            base: As for `gate_up`.
            fine: As for `gate_up`.
        """
        for (tier, preferred), vectors in zip(_tiers(base, fine), activated, strict=True):
            after = self._fills(tier, topk_ids.numel())
            self._stream(vectors, parts, topk_ids, tier, preferred, after=after, down=True)

    def _fills(self, tier: Tier, pairs: int) -> bool:
        """Whether the blocks of `gate_up` leave a processor little room.

        Blocks of `down` that start early where there is room lie unevenly, which costs more than
        the early start gains.
        """
        cut, rows = cut_of(tier.layout.codec, self.cuts, down=False), tier.layout.intermediate
        return self._blocks(cut, rows, pairs)[0] * pairs >= self.processors * (cut.resident - 1)

    def _blocks(self, cut: Cut, rows: int, pairs: int) -> tuple[int, int]:
        """Return the blocks of each pair, and the tiles that each computes."""
        strip = cut.strip(rows, pairs, self.processors)
        return -(-rows // (cut.tile_rows * strip)), strip

    def combine(
        self, out: Tensor, parts: Tensor, weights: Tensor, topk_ids: Tensor, base: Tier,
        fine: Tier | None, *, after: bool = False,
    ) -> None:  # fmt: skip
        """Set out bfloat16 [T, H] to the weighted sums of present parts, k ascending.

        `after` says that the kernel in front on this stream is one of `down`.
        """
        tokens, top_k = topk_ids.shape
        hidden = out.shape[1]
        packed = struct.pack(
            "<6Q4i",
            parts.data_ptr(),
            weights.data_ptr(),
            topk_ids.data_ptr(),
            base.slot_of.data_ptr(),
            fine.slot_of.data_ptr() if fine else 0,
            out.data_ptr(),
            len(base.slot_of),
            topk_ids.element_size() // 4,
            hidden,
            top_k,
        )
        grid = -(-hidden // (2 * _COMBINE_THREADS)), tokens
        self.launch("combine", grid, _COMBINE_THREADS, packed, after=after)

    def _stream(
        self,
        x: Tensor,
        out: Tensor,
        topk_ids: Tensor,
        tier: Tier,
        preferred: Tier | None,
        swiglu_limit: float = 0.0,
        missing: Tensor | None = None,
        wanted: Tensor | None = None,
        *,
        after: bool = False,
        down: bool = False,
    ) -> None:
        """Launch a kernel for the experts that a tier has and a preferred one has not."""
        layout, pairs = tier.layout, topk_ids.numel()
        cut = cut_of(layout.codec, self.cuts, down=down)
        k, rows = layout.hidden, layout.intermediate
        codes, scales = layout.codes13, layout.scales13
        if down:
            k, rows, codes, scales = rows, k, layout.codes2, layout.scales2
        after = after and self.overlap
        blocks, strip = self._blocks(cut, rows, pairs)
        optional = [preferred.slot_of if preferred else None, out, missing, wanted]
        pointers = [t.data_ptr() for t in (x, topk_ids, tier.pool, tier.slot_of)]
        pointers += [0 if t is None else t.data_ptr() for t in optional]
        numbers = (
            pairs,
            len(tier.slot_of),
            topk_ids.element_size() // 4,
            0 if missing is None else missing.element_size() // 4,
            65536 // topk_ids.shape[1] + 1,
            k,
            rows,
            codes.offset,
            scales.offset,
            layout.tensor_scales.offset,
            strip,
            int(after),
        )
        packed = pack_arguments(pointers, layout.row_bytes, numbers, swiglu_limit)
        self.launch(cut.name, (blocks, pairs), cut.threads, packed, after=after)


def _tiers(base: Tier, fine: Tier | None) -> list[tuple[Tier, Tier | None]]:
    """Return each tier and the one that is preferred to it."""
    return [(base, None)] if fine is None else [(base, fine), (fine, None)]


def _empty(vectors: int, columns: int, tier: Tier, device: torch.device) -> Tensor:
    """Return memory for vectors as a tier's kernels take them."""
    if tier.layout.codec == "w2":
        return torch.empty(vectors, limbed_bytes(columns), dtype=torch.uint8, device=device)
    return torch.empty(vectors, columns, dtype=torch.bfloat16, device=device)


def native_for(device: torch.device) -> Native | None:
    """Return the CUDA kernels for a device; None where Triton's compute, with a warning once."""
    if arch.capability(device) is None:
        return None  # the interpreter
    return _loaded(index_of(device))


@functools.cache
def _loaded(index: int) -> Native | None:
    return loaded("decode steps", index, _load)


def _load(device: torch.device) -> Native:
    major, minor = torch.cuda.get_device_capability(device)
    number = next(version for version in VERSIONS if version <= 10 * major + minor)
    image = ptx_path(number).read_bytes() + b"\0"
    return Native(device, image, overlap=number >= 90)
