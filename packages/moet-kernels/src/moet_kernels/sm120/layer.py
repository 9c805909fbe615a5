"""One expert layer of a decode step: prepare, gate and up, down, combine. Nothing waits.

Activations are quantised to E4M3 with a scale per 32 columns (`activations`), x at first and the
activated values by the kernel that makes them. A token's result does not depend on the others.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moet_core.row import RowLayout, Section
from moet_kernels.portable.tier import Tier
from moet_kernels.sm120.activations import SCALE_COLUMNS, steps_of
from moet_kernels.sm120.cases import CODECS, DOWN_ROWS, GATE_UP_ROWS, GROUP, THREADS
from moet_kernels.sm120.driver import Driver

__all__ = ["MOST_PAIRS", "MOST_TOKENS", "Layer", "kernel_name", "launch_combine", "launch_prepare"]

MOST_TOKENS = 16
"""Most tokens that the decode kernels take."""

MOST_PAIRS = 256
"""Most pairs (token, k): a thread each in `kernels/prepare.cu`."""

_COLUMNS = 4 * THREADS  # of a block of prepare and combine
_FAMILY = {codec: family for family, codec in CODECS.items()}


def kernel_name(codec: str, k: int, *, down: bool) -> str | None:
    """Return the decode kernel for a codec and K columns, None where there is none."""
    family = _FAMILY.get(codec)
    if family is None or k % 64:
        return None
    return f"{family}_{'down' if down else 'gate_up'}{'' if k % 128 == 0 else '_k64'}"


class Layer:
    """The kernels of one device.

    Args:
        driver: What launches them.
        functions: Name to loaded kernel, those that may be used.
    """

    def __init__(self, driver: Driver, functions: Mapping[str, Any]) -> None:
        self.driver = driver
        self.functions = functions

    @staticmethod
    def takes(topk_ids: Tensor) -> bool:
        """Whether so many tokens are a decode step's."""
        return len(topk_ids) <= MOST_TOKENS and topk_ids.numel() <= MOST_PAIRS

    def refusal(self, *layouts: RowLayout) -> str | None:
        """Say why rows cannot be computed with, as the end of a sentence; None if they can."""
        for layout in layouts:
            for k, down in ((layout.hidden, False), (layout.intermediate, True)):
                name = kernel_name(layout.codec, k, down=down)
                if name is None:
                    return f"has no kernel for {layout.codec} with {k} columns"
                if name not in self.functions:
                    return f"may not use its kernel {name}, which failed its self-test"
        missing = [name for name in ("prepare", "combine") if name not in self.functions]
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

        Arguments as of `moet_kernels.portable.layer.expert_layer`; `takes` and `refusal` are asked
        before.
        """
        parts = self.driver.empty((topk_ids.numel(), x.shape[1]), torch.float32)
        out = self.driver.empty(x.shape, torch.bfloat16)
        if topk_ids.numel() == 0:
            return out.zero_()
        options: dict[str, Any] = {
            "swiglu_limit": swiglu_limit,
            "missing": missing,
            "wanted": wanted,
        }
        present = self.add_parts(parts, x, topk_ids, base, fine, **options)
        function = self.functions["combine"]
        launch_combine(self.driver, function, parts, topk_weights, present, out)
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
    ) -> Tensor:
        """Set the rows of parts float32 [T * k, H] of present experts; see `experts.add_parts`.

        Returns:
            uint8 [T * k]: whether the expert of each pair is present.
        """
        layout, pairs = base.layout, topk_ids.numel()
        if topk_ids.dtype not in (torch.int32, torch.int64):
            topk_ids = topk_ids.int()
        tiers = [base] if fine is None else [base, fine]
        empty = self.driver.empty
        groups = [empty((pairs, GROUP.itemsize), torch.uint8) for _ in tiers]
        values, scales = self._vectors(len(x), layout.hidden)
        present = empty((pairs,), torch.uint8)
        launch_prepare(
            self.driver,
            self.functions["prepare"],
            x,
            topk_ids,
            tiers,
            groups,
            (values, scales, present),
            missing=missing,
            wanted=wanted,
        )
        activated, activated_scales = self._vectors(pairs, layout.intermediate)
        limit = swiglu_limit or float("inf")
        shift = _log2(steps_of(layout.intermediate))
        last = struct.pack("<QfI", activated_scales.data_ptr(), limit, shift)
        for tier, group in zip(tiers, groups, strict=True):
            tensors = (group, values, scales, activated, activated_scales, tier.pool)
            self._launch(tier.layout, tensors, last, down=False)
        for tier, group in zip(tiers, groups, strict=True):
            read = (group, activated, activated_scales, parts, tier.pool)
            self._launch(tier.layout, read, b"", down=True)
        return present

    def _vectors(self, count: int, columns: int) -> tuple[Tensor, Tensor]:
        values = self.driver.empty((count, columns), torch.uint8)
        return values, self.driver.empty((count, columns // SCALE_COLUMNS), torch.uint8)

    def _launch(
        self, layout: RowLayout, tensors: Sequence[Tensor], last: bytes, *, down: bool
    ) -> None:
        """Launch gate and up or down; the first four tensors are the kernel's first parameters."""
        sizes = (layout.hidden, layout.intermediate)
        sections: tuple[Section, Section] = (layout.codes13, layout.scales13)
        rows = GATE_UP_ROWS
        if down:
            sizes, sections, rows = sizes[::-1], (layout.codes2, layout.scales2), DOWN_ROWS
        k, n = sizes
        pointers = [tensor.data_ptr() for tensor in tensors[:4]]
        numbers = (k, n, *(section.offset for section in sections))
        parameters = struct.pack("<4Q4I", *pointers, *numbers) + last
        if layout.tensor_scales.length:
            parameters += struct.pack("<I", layout.tensor_scales.offset)
        name = kernel_name(layout.codec, k, down=down)
        assert name is not None, "refusal() is asked first"
        grid = -(-n // rows), len(tensors[0]), 1
        self.driver.launch(self.functions[name], grid, THREADS, parameters, tensors)


def launch_prepare(
    driver: Driver,
    function: Any,
    x: Tensor,
    topk_ids: Tensor,
    tiers: Sequence[Tier],
    groups: Sequence[Tensor],
    outputs: tuple[Tensor, Tensor, Tensor],
    *,
    missing: Tensor | None,
    wanted: Tensor | None,
) -> None:
    """Group the pairs by expert and quantise x.

    Args:
        driver: What launches.
        function: The kernel `prepare`.
        x: bfloat16 [T, H].
        topk_ids: int32 or int64 [T, k]. Ids outside 0..E-1 count as absent experts.
        tiers: Base, and fine if there is one.
        groups: For each, uint8 [T * k, 80], set to GROUP.
        outputs: uint8 [T, H], [T, H / 32] and [T * k]: values, scales, and which pairs are present.
        missing: int32 or int64 [1]; the number of distinct absent experts is added.
        wanted: uint8 [E]; set to 1 for every expert routed to.
    """
    if x.data_ptr() % 8:  # read four values at a time
        x = x.clone()
    top_k = topk_ids.shape[1]
    described = b""
    for i in range(2):
        numbers = [0] * 4
        if i < len(tiers):
            tier, group = tiers[i], groups[i]
            pointers = tier.slot_of.data_ptr(), tier.pool.data_ptr()
            numbers = [*pointers, tier.layout.row_bytes, group.data_ptr()]
        described += struct.pack("<4Q", *numbers)
    optional = [0 if tensor is None else tensor.data_ptr() for tensor in (wanted, missing)]
    parameters = struct.pack(
        "<2Q32s32s5Q7I",
        x.data_ptr(),
        topk_ids.data_ptr(),
        described[:32],
        described[32:],
        *(tensor.data_ptr() for tensor in outputs),
        *optional,
        topk_ids.element_size() // 4,
        1 if missing is None else missing.element_size() // 4,
        topk_ids.numel(),
        65536 // top_k + 1,
        len(tiers[0].slot_of),
        x.shape[1],
        _log2(steps_of(x.shape[1])),
    )
    tensors = [x, topk_ids, *groups, *outputs, *(t.slot_of for t in tiers)]
    tensors += [tensor for tensor in (missing, wanted) if tensor is not None]
    grid = 1 + -(-x.shape[1] // _COLUMNS), len(x), 1
    driver.launch(function, grid, THREADS, parameters, tensors)


def launch_combine(
    driver: Driver, function: Any, parts: Tensor, weights: Tensor, present: Tensor, out: Tensor
) -> None:
    """Set out bfloat16 [T, H] to the weighted sums of present parts, k ascending, in float32.

    Args:
        driver: What launches.
        function: The kernel `combine`.
        parts: float32 [T * k, H].
        weights: float32 [T, k].
        present: uint8 [T * k].
        out: bfloat16 [T, H].
    """
    tensors = (parts, weights, present, out)
    pointers = (tensor.data_ptr() for tensor in tensors)
    hidden = out.shape[1]
    parameters = struct.pack("<4Q2I", *pointers, hidden, weights.shape[1])
    grid = -(-hidden // _COLUMNS), len(out), 1
    driver.launch(function, grid, THREADS, parameters, tensors)


def _log2(number: int) -> int:
    return number.bit_length() - 1
