"""Takes an expert's checkpoint tensors as they arrive and encodes them into its row."""

from typing import Any, Protocol

import torch

from moet_core.codecs import check_bf16_range
from moet_core.errors import TensorError
from moet_core.row import RowLayout
from moet_kernels import encode
from moet_vllm.formats import ExpertFormat
from moet_vllm.report import Conversion

__all__ = ["ExpertStaging", "PoolRows", "RowTarget"]

MATRICES = {"w1": "gate", "w3": "up", "w2": "down"}

# Random bytes of a codec's scales, from and below, and its tensor scale: weights of about 2**-9.
_RANDOM_SCALES = {
    "w2": (114, 119, 0.0),
    "fp4-mx": (114, 119, 0.0),
    "fp4-nv": (0x34, 0x3C, 2.0**-11),
}


class RowTarget(Protocol):
    """Where the rows of a layer go."""

    @property
    def experts(self) -> int:
        """Number of rows."""

    @property
    def fine_layout(self) -> RowLayout | None:
        """Layout of the rows that are wanted besides, at the fine tier's precision."""

    @property
    def device(self) -> torch.device:
        """Where rows are encoded."""

    @property
    def needed(self) -> bool:
        """Whether the rows must be made; False where they are kept from an earlier start."""

    def row(self, expert: int) -> torch.Tensor:
        """Return the memory of one row, uint8 [row_bytes]."""

    def fine_row(self, expert: int) -> torch.Tensor:
        """Return the memory of one row of the fine tier, uint8 [row_bytes]."""

    def all_rows(self) -> torch.Tensor:
        """Return the memory of all rows, uint8 [experts, row_bytes]."""

    def complete(self) -> None:
        """Take note that every row is written."""


class PoolRows:
    """Rows in the pool that they are served from."""

    fine_layout: RowLayout | None = None

    def __init__(self, pool: torch.Tensor) -> None:
        self.pool = pool
        self.experts = len(pool)
        self.device = pool.device
        self.needed = True

    def row(self, expert: int) -> torch.Tensor:
        """Return the memory of one row, uint8 [row_bytes]."""
        return self.pool[expert]

    def fine_row(self, expert: int) -> torch.Tensor:
        """Raise: there is no fine tier here."""
        raise RuntimeError("rows in a pool of their own have no fine tier")

    def all_rows(self) -> torch.Tensor:
        """Return the pool."""
        return self.pool

    def complete(self) -> None:
        """Do nothing: the rows are where they are served."""


class ExpertStaging:
    """The experts of one layer while they load.

    Holds a checkpoint tensor only until its expert is complete: with a checkpoint that stores
    its experts one after the other that is one expert, never more than one layer.
    """

    def __init__(
        self,
        layer_name: str,
        source: ExpertFormat,
        layout: RowLayout,
        target: RowTarget,
        *,
        zeros: str,
        tp_rank: int,
        tp_size: int,
    ) -> None:
        self.layer_name = layer_name
        self.source = source
        self.layout = layout
        self.target = target
        self.zeros = zeros
        self.tp_rank = tp_rank
        self.tp_size = tp_size
        self._waiting: dict[int, dict[tuple[str, str], torch.Tensor]] = {}
        self._done: set[int] = set()
        self._staged_bytes = 0
        self._peak_staged_bytes = 0
        self._source_bytes = 0

    def load(self, parameter: str, shard_id: str, expert: int, tensor: torch.Tensor) -> None:
        """Take one tensor.

        Args:
            parameter: name of vLLM's parameter, such as `...experts.w13_weight_scale`.
            shard_id: "w1" (gate), "w3" (up) or "w2" (down).
            expert: the expert's number in the checkpoint.
            tensor: the whole tensor, not sharded.

        Raises:
            TensorError: an expert that was complete already, a tensor that came twice, or
                content that cannot be converted.
        """
        suffix = parameter.rpartition(".")[2].partition("_")[2]
        if suffix in self.source.ignored or not self.target.needed:
            return
        name = self._name(expert, shard_id, suffix)
        if expert in self._done:
            raise TensorError(
                name,
                wanted="each expert once, before serving",
                got="one more tensor for an expert that is converted already",
                advice="reloading weights of a running engine is not possible; restart it",
            )
        parts = self._waiting.setdefault(expert, {})
        if (shard_id, suffix) in parts:
            raise TensorError(name, wanted="one tensor of this name", got="a second one")
        parts[shard_id, suffix] = tensor
        self._staged_bytes += tensor.nbytes
        self._peak_staged_bytes = max(self._peak_staged_bytes, self._staged_bytes)
        if len(parts) == len(MATRICES) * len(self.source.needed):
            self._convert(expert, self._waiting.pop(expert))

    def fill_random(self) -> None:
        """Give every expert random codes and moderate scales (`--load-format dummy`)."""
        generator = torch.Generator(device=self.target.device).manual_seed(0)
        rows = self.target.all_rows()
        rows.random_(0, 256, generator=generator)
        low, high, tensor_scale = _RANDOM_SCALES[self.layout.codec]
        for section in (self.layout.scales13, self.layout.scales2):
            rows[:, section.slice].random_(low, high, generator=generator)
        if self.layout.tensor_scales.length:
            scales = torch.tensor([tensor_scale] * 3 + [0.0], dtype=torch.float32)
            rows[:, self.layout.tensor_scales.slice] = scales.view(torch.uint8).to(rows.device)
        rows[:, self.layout.payload_bytes :] = 0
        self._done = set(range(self.target.experts))
        self.target.complete()

    def finish(self) -> Conversion:
        """Check that every expert was converted and say what it came to.

        Raises:
            TensorError: names the first tensor that never arrived.
        """
        experts = self.target.experts
        for expert in range(experts if self.target.needed else 0):
            if expert in self._done:
                continue
            parts = self._waiting.get(expert, {})
            missing = [
                self._name(expert, shard_id, suffix)
                for shard_id in MATRICES
                for suffix in self.source.needed
                if (shard_id, suffix) not in parts
            ]
            raise TensorError(
                missing[0],
                wanted=f"all tensors of {experts} experts",
                got=f"{len(self._done)} complete experts; {len(missing)} tensors of expert "
                f"{expert} are not in the checkpoint",
                advice="a shard of the checkpoint is missing or incomplete; download it again",
            )
        layout = self.layout
        return Conversion(
            experts=experts,
            tensors=experts * len(MATRICES),
            weights=experts * 3 * layout.hidden * layout.intermediate,
            bytes_before=self._source_bytes // self.tp_size,
            bytes_after=experts * layout.payload_bytes,
            peak_staged_bytes=self._peak_staged_bytes,
            bits_per_weight=layout.bits_per_weight,
            codec=layout.codec,
            source=self.source.source if self.target.needed else "pack",
        )

    def _convert(self, expert: int, parts: dict[tuple[str, str], torch.Tensor]) -> None:
        sources = [self._source(expert, shard_id, parts) for shard_id in MATRICES]
        self._encode(expert, self.target.row(expert), self.layout, sources)
        if self.target.fine_layout is not None:
            self._encode(expert, self.target.fine_row(expert), self.target.fine_layout, sources)
        freed = sum(part.nbytes for part in parts.values())
        self._source_bytes += freed
        self._staged_bytes -= freed
        self._done.add(expert)
        if len(self._done) == self.target.experts:
            self.target.complete()
            if self.target.device.type == "cuda":
                # What conversion leaves in the allocator's cache was seen to grow with every
                # layer, to several times the model's size; other processes may need it.
                torch.cuda.empty_cache()

    def _encode(
        self, expert: int, row: torch.Tensor, layout: RowLayout, sources: list[Any]
    ) -> None:
        encode.encode_expert_into(
            row, layout, *sources, rank=self.tp_rank, size=self.tp_size, zeros=self.zeros
        )
        for section, shard_id in ((layout.scales13, "w1"), (layout.scales2, "w2")):
            scales = row[section.slice].cpu().numpy()
            check_bf16_range(scales, self._name(expert, shard_id, "weight"))

    def _source(
        self, expert: int, shard_id: str, parts: dict[tuple[str, str], torch.Tensor]
    ) -> Any:
        name = self._name(expert, shard_id, "weight")
        device = self.target.device
        tensors = [parts[shard_id, suffix].to(device) for suffix in self.source.needed]
        if self.source.source == "float":
            return encode.FloatSource(name, *tensors)
        if self.source.source == "fp8":
            weight, scale = tensors
            return encode.Fp8Source(name, weight, scale, self.source.block)
        if self.source.source == "mxfp4":
            return encode.Mxfp4Source(name, *tensors)
        return encode.Nvfp4Source(name, *tensors)

    def _name(self, expert: int, shard_id: str, suffix: str) -> str:
        return f"{self.layer_name}.{expert}.{MATRICES[shard_id]}_proj.{suffix}"
