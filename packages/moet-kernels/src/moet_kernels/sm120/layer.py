"""One expert layer of a decode step: prepare, gate and up, down, combine. Nothing waits.

Rows of w2 take activations in bfloat16, those of other codecs in E4M3 with a scale per 32 columns
(`activations`), x quantised at first and the activated values by the kernel that makes them. A
token's result does not depend on the others.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from moet_core.row import RowLayout, Section
from moet_kernels.portable.tier import Tier
from moet_kernels.sm120.activations import SCALE_COLUMNS, steps_of
from moet_kernels.sm120.cases import CODECS, DOWN_ROWS, GATE_UP_ROWS, GROUP, THREADS
from moet_kernels.sm120.driver import Driver

__all__ = [
    "MOST_PAIRS",
    "MOST_TOKENS",
    "Layer",
    "Vectors",
    "kernel_name",
    "launch_combine",
    "launch_prepare",
]

MOST_TOKENS = 16
"""Most tokens that the decode kernels take."""

MOST_PAIRS = 256
"""Most pairs (token, k): a thread each in `kernels/prepare.cu`."""

_COLUMNS = 4 * THREADS  # of a block of prepare and combine
_FAMILY = {codec: family for family, codec in CODECS.items()}


def kernel_name(codec: str, k: int, *, down: bool, bfloat16: bool = False) -> str | None:
    """Return the decode kernel for a codec and K columns, None where there is none.

    Args:
        codec: Of the rows.
        k: Columns of the matrix.
        down: Whether it is the down projection.
        bfloat16: Whether vectors are bfloat16, not E4M3; w2 alone has such kernels.
    """
    family = "bf16" if bfloat16 and codec == "w2" else _FAMILY.get(codec)
    if family is None or k % 64:
        return None
    return f"{family}_{'down' if down else 'gate_up'}{'' if k % 128 == 0 else '_k64'}"


class Vectors(NamedTuple):
    """Activations as a kernel takes or makes them.

    Attributes:
        values: bfloat16 [V, K] in column order, or uint8 [V, K], E4M3 in fragment order.
        scales: uint8 [V, K / 32] of E4M3, None of bfloat16.
    """

    values: Tensor
    scales: Tensor | None


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
    def takes(topk_ids: Tensor) -> bool:
        """Whether so many tokens are a decode step's."""
        return len(topk_ids) <= MOST_TOKENS and topk_ids.numel() <= MOST_PAIRS

    def refusal(self, *layouts: RowLayout) -> str | None:
        """Say why rows cannot be computed with, as the end of a sentence; None if they can."""
        for layout in layouts:
            for k, down in ((layout.hidden, False), (layout.intermediate, True)):
                name = self._name(layout.codec, k, down=down)
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
        if x.data_ptr() % 8:  # kernels read four values at a time
            x = x.clone()
        empty = self.driver.empty
        groups = [empty((pairs, GROUP.itemsize), torch.uint8) for _ in tiers]
        kinds = [self.bfloat16 and tier.layout.codec == "w2" for tier in tiers]
        vectors = {True: Vectors(x, None)}
        if False in kinds:
            vectors[False] = self._vectors(x.shape, False)
        present = empty((pairs,), torch.uint8)
        launch_prepare(
            self.driver,
            self.functions["prepare"],
            x,
            topk_ids,
            tiers,
            groups,
            present,
            vectors.get(False),
            missing=missing,
            wanted=wanted,
        )
        shape = (pairs, layout.intermediate)
        activated = {kind: self._vectors(shape, kind) for kind in set(kinds)}
        limit = swiglu_limit or float("inf")
        shift = _log2(steps_of(layout.intermediate))
        for tier, group, kind in zip(tiers, groups, kinds, strict=True):
            made = activated[kind]
            last = struct.pack("<QfI", _address(made.scales), limit, shift)
            self._launch(tier, group, vectors[kind], made, last, down=False)
        for tier, group, kind in zip(tiers, groups, kinds, strict=True):
            self._launch(tier, group, activated[kind], Vectors(parts, None), b"", down=True)
        return present

    def _name(self, codec: str, k: int, *, down: bool) -> str | None:
        return kernel_name(codec, k, down=down, bfloat16=self.bfloat16)

    def _vectors(self, shape: Sequence[int], bfloat16: bool) -> Vectors:
        if bfloat16:
            return Vectors(self.driver.empty(shape, torch.bfloat16), None)
        count, columns = shape
        scales = self.driver.empty((count, columns // SCALE_COLUMNS), torch.uint8)
        return Vectors(self.driver.empty(shape, torch.uint8), scales)

    def _launch(
        self, tier: Tier, group: Tensor, vectors: Vectors, out: Vectors, last: bytes, *, down: bool
    ) -> None:
        """Launch gate and up or down; `last` are the parameters that one of them has."""
        layout = tier.layout
        sizes = (layout.hidden, layout.intermediate)
        sections: tuple[Section, Section] = (layout.codes13, layout.scales13)
        rows = GATE_UP_ROWS
        if down:
            sizes, sections, rows = sizes[::-1], (layout.codes2, layout.scales2), DOWN_ROWS
        k, n = sizes
        pointers = (group.data_ptr(), vectors.values.data_ptr(), _address(vectors.scales))
        numbers = (k, n, *(section.offset for section in sections))
        parameters = struct.pack("<4Q4I", *pointers, out.values.data_ptr(), *numbers) + last
        if layout.tensor_scales.length:
            parameters += struct.pack("<I", layout.tensor_scales.offset)
        name = self._name(layout.codec, k, down=down)
        assert name is not None, "refusal() is asked first"
        tensors = [t for t in (group, *vectors, *out, tier.pool) if t is not None]
        grid = -(-n // rows), len(group), 1
        self.driver.launch(self.functions[name], grid, THREADS, parameters, tensors)


def launch_prepare(
    driver: Driver,
    function: Any,
    x: Tensor,
    topk_ids: Tensor,
    tiers: Sequence[Tier],
    groups: Sequence[Tensor],
    present: Tensor,
    quantised: Vectors | None,
    *,
    missing: Tensor | None,
    wanted: Tensor | None,
) -> None:
    """Group the pairs by expert and, where a tier takes it in E4M3, quantise x.

    Args:
        driver: What launches.
        function: The kernel `prepare`.
        x: bfloat16 [T, H], at an address divisible by 8.
        topk_ids: int32 or int64 [T, k]. Ids outside 0..E-1 count as absent experts.
        tiers: Base, and fine if there is one.
        groups: For each, uint8 [T * k, 80], set to GROUP.
        present: uint8 [T * k], set to whether the expert of each pair is present.
        quantised: Set to x in E4M3, or None.
        missing: int32 or int64 [1]; the number of distinct absent experts is added.
        wanted: uint8 [E]; set to 1 for every expert routed to.
    """
    top_k = topk_ids.shape[1]
    described = b""
    for i in range(2):
        numbers = [0] * 4
        if i < len(tiers):
            tier, group = tiers[i], groups[i]
            pointers = tier.slot_of.data_ptr(), tier.pool.data_ptr()
            numbers = [*pointers, tier.layout.row_bytes, group.data_ptr()]
        described += struct.pack("<4Q", *numbers)
    values, scales = quantised or (None, None)
    parameters = struct.pack(
        "<2Q32s32s5Q7I",
        x.data_ptr(),
        topk_ids.data_ptr(),
        described[:32],
        described[32:],
        *(_address(tensor) for tensor in (values, scales, present, wanted, missing)),
        topk_ids.element_size() // 4,
        1 if missing is None else missing.element_size() // 4,
        topk_ids.numel(),
        65536 // top_k + 1,
        len(tiers[0].slot_of),
        x.shape[1],
        _log2(steps_of(x.shape[1])),
    )
    tensors = [x, topk_ids, *groups, present, *(t.slot_of for t in tiers)]
    tensors += [tensor for tensor in (values, scales, missing, wanted) if tensor is not None]
    # Blocks behind the first quantise; the first of the first token makes the groups.
    grid = (1, 1, 1) if quantised is None else (1 + -(-x.shape[1] // _COLUMNS), len(x), 1)
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


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _log2(number: int) -> int:
    return number.bit_length() - 1
