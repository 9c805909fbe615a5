"""Makes the resident experts of a rank while its model loads.

Layers announce themselves when the model is built. Rows come from the checkpoint, converted layer
by layer, or from packs that an earlier start wrote; packs that are missing are written on the way.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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
from moet_vllm.residency import op
from moet_vllm.residency.resident import PoolShape, ResidentExperts
from moet_vllm.residency.stores import HostStore, PackStore, PinnedStore

__all__ = ["LayerRows", "Rank", "ResidencyBuild", "building", "current_build", "pool_shape"]

GIB = 2**30
MIN_STAGING = 16


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank needs to know of itself.

    Attributes:
        tp_rank: Its number in the tensor-parallel group.
        tp_size: Size of that group.
        device: Where its pool lies.
        checkpoint: Folder of the checkpoint, None for random weights.
        agree: Maximum over the tensor-parallel group.
        pin: Locks host memory for the device.
    """

    tp_rank: int
    tp_size: int
    device: torch.device
    checkpoint: Path | None
    agree: Callable[[int], int] | None = None
    pin: Callable[[memoryview], object] | None = None


class LayerRows:
    """Where the rows of one layer go while the checkpoint loads.

    Attributes:
        experts: Number of rows.
    """

    def __init__(self, build: "ResidencyBuild", layer: int) -> None:
        self.experts = build.experts
        self._build = build
        self._layer = layer
        self._rows: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where rows are encoded."""
        return self._build.rank.device

    @property
    def needed(self) -> bool:
        """Whether the checkpoint's tensors are needed; a pack may hold the rows already."""
        return self._build.needs(self._layer)

    def row(self, expert: int) -> Tensor:
        """Return the memory of one row, uint8 [row_bytes]; the first call allocates the layer."""
        return self.all_rows()[expert]

    def all_rows(self) -> Tensor:
        """Return the memory of all rows, uint8 [experts, row_bytes]."""
        if self._rows is None:
            size = self.experts, self._build.layout.row_bytes
            self._rows = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._rows

    def complete(self) -> None:
        """Hand the layer over: every row is written. Its memory is freed."""
        rows, self._rows = self.all_rows(), None
        self._build.take_layer(self._layer, rows.cpu())


class ResidencyBuild:
    """Collects the layers of one rank; `finish` makes its resident experts.

    Attributes:
        write_seconds: Time that writing packs took.
        open_seconds: Time that opening packs and host memory took.
    """

    def __init__(self, config: MoetConfig, rank: Rank) -> None:
        if config.packs and rank.checkpoint is None:
            raise ConfigError(
                "Packs hold the experts of a checkpoint, and random weights (--load-format dummy) "
                "come from none: leave packs out."
            )
        self.config = config
        self.rank = rank
        self.layout: RowLayout
        self.experts = self.top_k = 0
        self._names: dict[int, str] = {}
        self._pinned: PinnedStore | None = None
        self._writer: StripedWriter | None = None
        self._spec: PackSpec | None = None
        self._missing: set[int] | None = None
        self.write_seconds = self.open_seconds = 0.0

    @property
    def layers(self) -> tuple[int, ...]:
        """Model indices of the layers announced, ascending."""
        return tuple(sorted(self._names))

    def add_layer(
        self, name: str, layer: int, layout: RowLayout, experts: int, top_k: int
    ) -> LayerRows:
        """Announce a layer.

        Args:
            name: Name of the module; `op.resident_experts` is called with it.
            layer: Model index.
            layout: Layout of its rows.
            experts: Its number of routed experts.
            top_k: Experts a token is routed to.

        Raises:
            ConfigError: A layer of another shape than the others: one pool cannot hold both.
        """
        shape = layout, experts, top_k
        if self._names and shape != (self.layout, self.experts, self.top_k):
            raise ConfigError(
                f"Layer {name} has other experts than the layers before it ({experts} experts, "
                f"top {top_k}, rows of {layout.row_bytes} bytes); one pool cannot hold both. Serve "
                "this model with pool=all and without packs."
            )
        self.layout, self.experts, self.top_k = shape
        self._names[layer] = name
        return LayerRows(self, layer)

    def again(self, config: MoetConfig) -> "ResidencyBuild":
        """Return a build of the same layers with other settings, whose rows packs hold.

        Raises:
            ConfigError: The packs do not hold every layer.
        """
        other = ResidencyBuild(config, self.rank)
        for layer, name in self._names.items():
            other.add_layer(name, layer, self.layout, self.experts, self.top_k)
        missing = [layer for layer in other.layers if other.needs(layer)]
        if missing:
            raise ConfigError(
                f"A pool can only be opened again from complete packs; layers {missing} are not "
                f"in packs={config.packs!r}."
            )
        return other

    def needs(self, layer: int) -> bool:
        """Say whether a layer's rows must come from the checkpoint."""
        self._open()
        return self._missing is None or layer in self._missing

    def take_layer(self, layer: int, rows: Tensor) -> None:
        """Keep the rows of a layer, uint8 [experts, row_bytes] on the host."""
        self._open()
        if self._writer is not None:
            started = time.perf_counter()
            self._writer.write_layer(layer, [row.numpy() for row in rows])
            self.write_seconds += time.perf_counter() - started
        if self._pinned is not None:
            for expert, row in enumerate(rows):
                self._pinned.row((layer, expert))[:] = memoryview(row.numpy())

    def finish(self) -> ResidentExperts | None:
        """Return the resident experts, ready to serve; None for a rank without any.

        Raises:
            ConfigError: A pool or an arena that is too small.
            PackError: A pack that cannot be read.
        """
        if not self._names:
            return None
        self._open()
        shape = pool_shape(self.config.pool, self.layers, self.experts, self.top_k, self.layout)
        started = time.perf_counter()
        store = self._store(shape)
        self.open_seconds = time.perf_counter() - started
        tolerance = self.config.miss_tolerance
        resident = ResidentExperts(shape, store, self.rank.device, self.rank.agree, tolerance)
        op.bind([self._names[layer] for layer in self.layers], resident)
        return resident

    def _open(self) -> None:
        """Find out what packs there are; all layers have been announced by now."""
        if self._spec is not None or self._pinned is not None:
            return
        if self.config.pool != "all" and self.config.store == "pinned":
            self._pinned = PinnedStore(
                self.layers, self.experts, self.layout.row_bytes, self.rank.pin
            )
        if self.config.packs:
            folders = self.config.pack_folders
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
            self._spec = self._pack_spec()
            self._writer = StripedWriter(folders, self._spec)
            self._missing = set(self._writer.missing)

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
        )

    def _store(self, shape: PoolShape) -> HostStore:
        if self._writer is not None:
            self._writer.close()
        if self._spec is None:
            assert self._pinned is not None
            return self._pinned
        reader = self._reader(self._spec)
        if self._pinned is not None:
            missing = self._missing or set()
            self._fill_pinned(self._pinned, reader, set(self.layers) - missing)
            reader.close()
            return self._pinned
        arena_rows = 0
        if self.config.pool != "all" and self.config.store == "arena":
            assert self.config.arena is not None
            arena_rows = min(int(self.config.arena * GIB) // shape.row.row_bytes, shape.all_experts)
            if arena_rows < 1:
                raise ConfigError(
                    f"arena is {self.config.arena} GiB, but one expert of this model takes "
                    f"{shape.row.row_bytes / GIB:.4f}; make it larger."
                )
        staging = max(MIN_STAGING, shape.ring)
        return PackStore(reader, staging=staging, arena_rows=arena_rows, pin=self.rank.pin)

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


def pool_shape(
    pool: float | str, layers: tuple[int, ...], experts: int, top_k: int, row: RowLayout
) -> PoolShape:
    """Divide a pool into slots and the ring of streamed steps.

    Args:
        pool: GiB, or "all".
        layers: Model indices of the rank's layers.
        experts: Routed experts of a layer.
        top_k: Experts a token is routed to.
        row: Layout of a row.

    Raises:
        ConfigError: The pool is smaller than one layer.
    """
    total = len(layers) * experts
    slots = total if pool == "all" else int(float(pool) * GIB) // row.row_bytes
    if slots < experts:
        raise ConfigError(
            f"pool is {pool} GiB, which holds {slots} experts; wanted at least one layer of "
            f"{experts} ({experts * row.row_bytes / GIB:.4f} GiB). Make pool larger."
        )
    if slots >= total:
        return PoolShape(layers=layers, experts=experts, top_k=top_k, row=row, slots=total, ring=0)
    ring = max(2, min(2 * top_k, slots // 4), slots // 32) // 2 * 2
    return PoolShape(
        layers=layers, experts=experts, top_k=top_k, row=row, slots=slots - ring, ring=ring
    )


_current: list[ResidencyBuild] = []


@contextlib.contextmanager
def building(build: ResidencyBuild) -> Iterator[ResidencyBuild]:
    """Let layers that are made inside the block announce themselves to `build`."""
    _current.append(build)
    try:
        yield build
    finally:
        _current.remove(build)


def current_build() -> ResidencyBuild | None:
    """Return the build that layers announce themselves to, None outside of `building`."""
    return _current[-1] if _current else None
