"""The rows of one tier while a model loads: kept in host memory, written to packs, or both."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import Tensor

from moet_core.errors import ConfigError
from moet_core.row import RowLayout
from moet_store import (
    PackReader,
    PackSpec,
    StripedWriter,
    bytes_identity,
    expert_spec,
    pack_path,
)
from moet_store.identity import checkpoint_files, identity_of, recorded_files, write_record
from moet_vllm.config import MoetConfig
from moet_vllm.residency.sizing import GIB
from moet_vllm.residency.stores import HostStore, PackStore, Pin, PinnedStore
from moet_vllm.residency.tier import PoolShape

__all__ = ["Rank", "TierRows"]

MIN_STAGING = 16


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank needs to know of itself.

    Attributes:
        tp_rank: Its number in the tensor-parallel group.
        tp_size: Size of that group.
        device: Where its pool lies.
        checkpoint: Folder of the checkpoint, None for random weights.
        agree: Maximum over the tensor-parallel group.
        pin: Locks host memory for the device; returns what unlocks it.
        padded: Rows at most of a padded pass; see `ResidentExperts`.
    """

    tp_rank: int
    tp_size: int
    device: torch.device
    checkpoint: Path | None
    agree: Callable[[int], int] | None = None
    pin: Pin | None = None
    padded: int = 0


class TierRows:
    """Rows of one tier, from the checkpoint or from packs.

    Args:
        config: The plugin's settings.
        rank: Whose rows.
        tier: "base" or "fine".
        layout: Layout of a row.
        layers: Model indices of the rank's layers.
        experts: Routed experts of a layer.

    Attributes:
        write_seconds: Time that writing packs took.
    """

    def __init__(
        self,
        config: MoetConfig,
        rank: Rank,
        tier: Literal["base", "fine"],
        layout: RowLayout,
        layers: tuple[int, ...],
        experts: int,
    ) -> None:
        self.config = config
        self.rank = rank
        self.tier = tier
        self.layout = layout
        self.layers = layers
        self.experts = experts
        self.write_seconds = 0.0
        self._pinned: PinnedStore | None = None
        self._writer: StripedWriter | None = None
        self._spec: PackSpec | None = None
        self._missing = set(layers)
        if not config.packs or config.host_store == "pinned":
            self._pinned = PinnedStore(layers, experts, layout.row_bytes, rank.pin)
        if config.packs:
            for folder in config.pack_folders:
                folder.mkdir(parents=True, exist_ok=True)
            self._spec = self._pack_spec()
            self._writer = StripedWriter(config.pack_folders, self._spec)
            self._missing = set(self._writer.missing)

    def needs(self, layer: int) -> bool:
        """Say whether a layer's rows must come from the checkpoint."""
        return layer in self._missing

    def take_layer(self, layer: int, rows: Tensor) -> None:
        """Keep the rows of a layer, uint8 [experts, row_bytes] on the host."""
        if self._writer is not None:
            started = time.perf_counter()
            self._writer.write_layer(layer, [row.numpy() for row in rows])
            self.write_seconds += time.perf_counter() - started
        if self._pinned is not None:
            for expert, row in enumerate(rows):
                self._pinned.row((layer, expert))[:] = memoryview(row.numpy())

    def store(self, shape: PoolShape) -> HostStore:
        """Return the store of all rows; every layer has been taken or was in packs.

        Raises:
            ConfigError: An arena below one row.
            PackError: A pack that cannot be read.
        """
        if self._writer is not None:
            self._writer.close()
        if self._spec is None:
            assert self._pinned is not None
            return self._pinned
        reader = self._reader(self._spec)
        if self._pinned is not None:
            self._fill_pinned(self._pinned, reader, set(self.layers) - self._missing)
            reader.close()
            return self._pinned
        # A chunk is being copied, one is being read, and the next two are read ahead.
        staging = max(MIN_STAGING, 2 * shape.ring)
        rows = self._arena_rows(shape)
        return PackStore(reader, staging=staging, arena_rows=rows, pin=self.rank.pin)

    def _arena_rows(self, shape: PoolShape) -> int:
        name = "arena" if self.tier == "base" else "fine_arena"
        size = self.config.arena if self.tier == "base" else self.config.fine_arena
        if size is None:
            return 0
        rows = min(int(size * GIB) // shape.row.row_bytes, shape.all_experts)
        if rows < 1:
            raise ConfigError(
                f"{name} is {size} GiB, but one expert of this model takes "
                f"{shape.row.row_bytes / GIB:.4f}; make it larger."
            )
        return rows

    def _pack_spec(self) -> PackSpec:
        assert self.rank.checkpoint is not None
        folder = self.config.pack_folders[0]
        files = recorded_files(folder, checkpoint_files(self.rank.checkpoint))
        write_record(folder, files)
        identity = identity_of(files)
        if self.config.zeros != "auto":
            identity = bytes_identity(f"{identity} zeros={self.config.zeros}".encode())
        return expert_spec(
            self.layout,
            checkpoint=identity,
            layers=self.layers,
            experts=self.experts,
            rank=self.rank.tp_rank,
            size=self.rank.tp_size,
            tier=self.tier,
        )

    def _reader(self, spec: PackSpec) -> PackReader:
        folders = self.config.pack_folders
        parts = [spec.striped(number, len(folders)) for number in range(len(folders))]
        paths = [pack_path(folder, part) for folder, part in zip(folders, parts, strict=True)]
        return PackReader(paths, wanted=spec, direct=self.config.pack_reads != "cached")

    def _fill_pinned(self, store: PinnedStore, reader: PackReader, layers: set[int]) -> None:
        """Read the layers into memory that a pack held before this start."""
        keys = [key for key in reader.written_keys() if key[0] in layers]
        reader.submit(keys, [store.row(key) for key in keys])
        for completion in reader.wait():
            if completion.error is not None:
                raise completion.error
