"""One expert layer: group the pairs, gate and up, down, combine. Nothing waits.

Activations are E4M3 with a scale per 32 columns (`activations`), x quantised at first and the
activated values by the kernel that makes them; in decode steps, rows of w2 take bfloat16. A token's
result does not depend on the others, but for whether they make it a decode step.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from moet_core.row import RowLayout, Section
from moet_kernels.portable.tier import Tier
from moet_kernels.sm120.activations import SCALE_COLUMNS, steps_of
from moet_kernels.sm120.cases import CODECS, DECODE, PREFILL, Tiling
from moet_kernels.sm120.driver import Driver
from moet_kernels.sm120.launches import (
    Vectors,
    address,
    launch_combine,
    launch_mark,
    launch_prepare,
    launch_sort,
    log2,
    tiles_of,
)

__all__ = ["MOST_PAIRS", "MOST_TOKENS", "Layer", "kernel_name"]

MOST_TOKENS = 16
"""Most tokens of a decode step."""

MOST_PAIRS = 256
"""Most pairs (token, k) of a decode step: a thread each in `kernels/prepare.cu`."""

_PARTS_BYTES = 2**30
"""Bound on the parts held at a time; more tokens are computed in portions."""

_AT_ONCE = 2**15
"""Bound on a portion's tokens, and with 8 experts each on its pairs: grids have 65535 rows."""

_AROUND = {DECODE: ("prepare", "combine"), PREFILL: ("sort", "mark", "combine")}
_FAMILY = {codec: family for family, codec in CODECS.items()}


def kernel_name(
    codec: str, k: int, *, down: bool, bfloat16: bool = False, tiling: Tiling = DECODE
) -> str | None:
    """Return the kernel for a codec and K columns, None where there is none.

    Args:
        codec: Of the rows.
        k: Columns of the matrix.
        down: Whether it is the down projection.
        bfloat16: Whether vectors are bfloat16, not E4M3; w2 alone has such kernels, for decode.
        tiling: DECODE or PREFILL.
    """
    family = "bf16" if bfloat16 and codec == "w2" else _FAMILY.get(codec)
    if family is None or k % 64:
        return None
    tiles = "" if tiling is DECODE else "_tiles"
    return f"{family}_{'down' if down else 'gate_up'}{tiles}{'' if k % 128 == 0 else '_k64'}"


class Layer:
    """The kernels of one device.

    Args:
        driver: What launches them.
        functions: Name to loaded kernel, those that may be used.
        bfloat16: Whether rows of w2 take activations in bfloat16, not in E4M3.
    """

    def __init__(
        self, driver: Driver, functions: Mapping[str, Any], *, bfloat16: bool = True
    ) -> None:
        self.driver = driver
        self.functions = functions
        self.bfloat16 = bfloat16

    def quantising(self) -> Self:
        """Return the same kernels with activations in E4M3 for all codecs."""
        return type(self)(self.driver, self.functions, bfloat16=False)

    @staticmethod
    def tiling(topk_ids: Tensor) -> Tiling:
        """Return how a step with these ids is cut: as a decode step if it is small enough."""
        few = len(topk_ids) <= MOST_TOKENS and topk_ids.numel() <= MOST_PAIRS
        return DECODE if few else PREFILL

    def refusal(self, topk_ids: Tensor, *layouts: RowLayout) -> str | None:
        """Say why rows cannot be computed with, as the end of a sentence; None if they can."""
        tiling = self.tiling(topk_ids)
        for layout in layouts:
            for k, down in ((layout.hidden, False), (layout.intermediate, True)):
                name = self._name(layout.codec, k, tiling, down=down)
                if name is None:
                    return f"has no kernel for {layout.codec} with {k} columns"
                if name not in self.functions:
                    return f"may not use its kernel {name}, which failed its self-test"
        missing = [name for name in _AROUND[tiling] if name not in self.functions]
        return f"may not use its kernel {missing[0]}" if missing else None

    def expert_layer(
        self,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        base: Tier,
        fine: Tier | None,
        *,
        swiglu_limit: float,
        missing: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Return the weighted sum of each token's experts, bfloat16 [T, H].

        Arguments as of `moet_kernels.portable.layer.expert_layer`; `refusal` is asked before.
        """
        out = self.driver.empty(x.shape, torch.bfloat16)
        if topk_ids.numel() == 0:
            return out.zero_()
        tiers = [base] if fine is None else [base, fine]
        step = self._begin(x, topk_ids, tiers, missing, wanted)
        for part in _portions(topk_ids, x.shape[1]):
            weights = topk_weights[part]
            parts = self.driver.empty((weights.numel(), x.shape[1]), torch.float32)
            present = self._add(parts, step, part, swiglu_limit)
            function = self.functions["combine"]
            launch_combine(self.driver, function, parts, weights, present, out[part])
        return out

    def add_parts(
        self,
        parts: Tensor,
        x: Tensor,
        topk_ids: Tensor,
        base: Tier,
        fine: Tier | None,
        *,
        swiglu_limit: float,
        missing: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> None:
        """Set the rows of parts float32 [T * k, H] of present experts; see `experts.add_parts`."""
        if topk_ids.numel() == 0:
            return
        tiers = [base] if fine is None else [base, fine]
        step = self._begin(x, topk_ids, tiers, missing, wanted)
        top_k = topk_ids.shape[1]
        for part in _portions(topk_ids, x.shape[1]):
            pairs = slice(part.start * top_k, part.stop * top_k)
            self._add(parts[pairs], step, part, swiglu_limit)

    def _begin(
        self,
        x: Tensor,
        topk_ids: Tensor,
        tiers: Sequence[Tier],
        missing: Tensor | None,
        wanted: Tensor | None,
    ) -> "_Step":
        """Bring tensors into the kernels' form, and mark experts where `prepare` does not."""
        if topk_ids.dtype not in (torch.int32, torch.int64):
            topk_ids = topk_ids.int()
        if x.data_ptr() % 8:  # kernels read four values at a time
            x = x.clone()
        tiling = self.tiling(topk_ids)
        if tiling is PREFILL and (missing is not None or wanted is not None):
            # For all portions at once, so that none counts an expert that another one counts.
            marks = {"missing": missing, "wanted": wanted}
            launch_mark(self.driver, self.functions["mark"], topk_ids, tiers, **marks)
        return _Step(tiling, x, topk_ids, tiers, missing, wanted)

    def _add(self, parts: Tensor, step: "_Step", part: slice, swiglu_limit: float) -> Tensor:
        """Set the parts of a portion's tokens; whether the expert of each pair is present."""
        x, topk_ids, tiers, tiling = step.x[part], step.topk_ids[part], step.tiers, step.tiling
        layout, pairs = tiers[0].layout, topk_ids.numel()
        empty = self.driver.empty
        kinds = [self._bfloat16(tier.layout.codec, tiling) for tier in tiers]
        vectors = {True: Vectors(x, None)}
        if False in kinds:
            vectors[False] = self._vectors(x.shape, False)
        present = empty((pairs,), torch.uint8)
        count = pairs if tiling is DECODE else tiles_of(pairs, len(tiers[0].slot_of))
        groups = [empty((count, tiling.group.itemsize), torch.uint8) for _ in tiers]
        before = (x, topk_ids, tiers, groups, present, vectors.get(False))
        if tiling is DECODE:
            function, missing, wanted = self.functions["prepare"], step.missing, step.wanted
            launch_prepare(self.driver, function, *before, missing=missing, wanted=wanted)
        else:
            launch_sort(self.driver, self.functions["sort"], *before)
        shape = (pairs, layout.intermediate)
        activated = {kind: self._vectors(shape, kind) for kind in set(kinds)}
        limit = swiglu_limit or float("inf")
        shift = log2(steps_of(layout.intermediate))
        for tier, group, kind in zip(tiers, groups, kinds, strict=True):
            made = activated[kind]
            last = struct.pack("<QfI", address(made.scales), limit, shift)
            self._launch(tier, tiling, group, vectors[kind], made, last, down=False)
        for tier, group, kind in zip(tiers, groups, kinds, strict=True):
            out = Vectors(parts, None)
            self._launch(tier, tiling, group, activated[kind], out, b"", down=True)
        return present

    def _bfloat16(self, codec: str, tiling: Tiling) -> bool:
        return self.bfloat16 and codec == "w2" and tiling is DECODE

    def _name(self, codec: str, k: int, tiling: Tiling, *, down: bool) -> str | None:
        bfloat16 = self._bfloat16(codec, tiling)
        return kernel_name(codec, k, down=down, bfloat16=bfloat16, tiling=tiling)

    def _vectors(self, shape: Sequence[int], bfloat16: bool) -> Vectors:
        if bfloat16:
            return Vectors(self.driver.empty(shape, torch.bfloat16), None)
        count, columns = shape
        scales = self.driver.empty((count, columns // SCALE_COLUMNS), torch.uint8)
        return Vectors(self.driver.empty(shape, torch.uint8), scales)

    def _launch(
        self,
        tier: Tier,
        tiling: Tiling,
        group: Tensor,
        vectors: Vectors,
        out: Vectors,
        last: bytes,
        *,
        down: bool,
    ) -> None:
        """Launch gate and up or down; `last` are the parameters that one of them has."""
        layout = tier.layout
        sizes = (layout.hidden, layout.intermediate)
        sections: tuple[Section, Section] = (layout.codes13, layout.scales13)
        rows = tiling.gate_up_rows
        if down:
            sizes, sections, rows = sizes[::-1], (layout.codes2, layout.scales2), tiling.down_rows
        k, n = sizes
        pointers = (group.data_ptr(), vectors.values.data_ptr(), address(vectors.scales))
        numbers = (k, n, *(section.offset for section in sections))
        parameters = struct.pack("<4Q4I", *pointers, out.values.data_ptr(), *numbers) + last
        if layout.tensor_scales.length:
            parameters += struct.pack("<I", layout.tensor_scales.offset)
        name = self._name(layout.codec, k, tiling, down=down)
        assert name is not None, "refusal() is asked first"
        tensors = [t for t in (group, *vectors, *out, tier.pool) if t is not None]
        grid = -(-n // rows), len(group), 1
        self.driver.launch(self.functions[name], grid, tiling.threads, parameters, tensors)


class _Step(NamedTuple):
    """A step's tensors, as the kernels take them."""

    tiling: Tiling
    x: Tensor
    topk_ids: Tensor
    tiers: Sequence[Tier]
    missing: Tensor | None
    wanted: Tensor | None


def _portions(topk_ids: Tensor, hidden: int) -> Iterator[slice]:
    """Slices of tokens that are computed together."""
    tokens, top_k = topk_ids.shape
    most = min(_AT_ONCE, 8 * _AT_ONCE // top_k, _PARTS_BYTES // (4 * hidden * top_k))
    at_a_time = max(MOST_TOKENS, most)
    for start in range(0, tokens, at_a_time):
        yield slice(start, min(start + at_a_time, tokens))
