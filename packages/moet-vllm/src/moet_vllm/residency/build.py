"""Makes the resident experts of a rank while its model loads.

Layers announce themselves when the model is built. Rows come from the checkpoint, converted layer
by layer, or from packs that an earlier start wrote; packs that are missing are written on the way.
"""

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from moet_core.errors import ConfigError
from moet_core.gate import Gate, GateSettings
from moet_core.row import RowLayout
from moet_vllm.config import MoetConfig
from moet_vllm.residency import op
from moet_vllm.residency.resident import FineTier, ResidentExperts
from moet_vllm.residency.rows import Rank, TierRows
from moet_vllm.residency.sizing import least_pool, pool_shape
from moet_vllm.residency.tier import Tier

__all__ = ["LayerRows", "Rank", "ResidencyBuild", "building", "current_build", "pool_shape"]


class LayerRows:
    """Where the rows of one layer go while the checkpoint loads.

    Attributes:
        experts: Number of rows.
        fine_layout: Layout of the fine tier's rows, None without one.
    """

    def __init__(self, build: "ResidencyBuild", layer: int) -> None:
        self.experts = build.experts
        self.fine_layout = build.fine_layout
        self._build = build
        self._layer = layer
        self._rows: dict[RowLayout, Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where rows are encoded."""
        return self._build.rank.device

    @property
    def needed(self) -> bool:
        """Whether the checkpoint's tensors are needed; packs may hold the rows already."""
        return self._build.needs(self._layer)

    def row(self, expert: int) -> Tensor:
        """Return the memory of one row, uint8 [row_bytes]; the first call allocates the layer."""
        return self.all_rows()[expert]

    def fine_row(self, expert: int) -> Tensor:
        """Return the memory of one row of the fine tier, uint8 [row_bytes]."""
        assert self.fine_layout is not None
        return self._memory(self.fine_layout)[expert]

    def all_rows(self) -> Tensor:
        """Return the memory of all rows, uint8 [experts, row_bytes]."""
        return self._memory(self._build.layout)

    def complete(self) -> None:
        """Hand the layer over: every row is written. Its memory is freed."""
        layouts = [self._build.layout, *([self.fine_layout] if self.fine_layout else [])]
        for tier, layout in zip(self._build.tiers(), layouts, strict=True):
            rows = self._memory(layout)
            del self._rows[layout]
            tier.take_layer(self._layer, rows.cpu())

    def _memory(self, layout: RowLayout) -> Tensor:
        if layout not in self._rows:
            size = self.experts, layout.row_bytes
            self._rows[layout] = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._rows[layout]


class ResidencyBuild:
    """Collects the layers of one rank; `finish` makes its resident experts.

    Attributes:
        fine_layout: Layout of the fine tier's rows, None without one.
        open_seconds: Time that opening packs and host memory took.
    """

    def __init__(self, config: MoetConfig, rank: Rank) -> None:
        for option, is_set in (("packs", config.packs), ("fine", config.fine is not None)):
            if is_set and rank.checkpoint is None:
                raise ConfigError(
                    f"Option {option} needs the experts of a checkpoint, and random weights "
                    f"(--load-format dummy) come from none: leave {option} out."
                )
        self.config = config
        self.rank = rank
        self.layout: RowLayout
        self.fine_layout: RowLayout | None = None
        self.experts = self.top_k = 0
        self.open_seconds = 0.0
        self._fine_of_packs: RowLayout | None = None
        self._names: dict[int, str] = {}
        self._tiers: list[TierRows] = []

    @property
    def layers(self) -> tuple[int, ...]:
        """Model indices of the layers announced, ascending."""
        return tuple(sorted(self._names))

    @property
    def write_seconds(self) -> float:
        """Time that writing packs took."""
        return sum(tier.write_seconds for tier in self._tiers)

    def add_layer(
        self,
        name: str,
        layer: int,
        layout: RowLayout,
        experts: int,
        top_k: int,
        fine_layout: RowLayout | None = None,
    ) -> LayerRows:
        """Announce a layer.

        Args:
            name: Name of the module; `op.resident_experts` is called with it.
            layer: Model index.
            layout: Layout of its rows.
            experts: Its number of routed experts.
            top_k: Experts a token is routed to.
            fine_layout: Layout of its rows in the fine tier, if there is one.

        Raises:
            ConfigError: A layer of another shape than the others: one pool cannot hold both.
        """
        shape = layout, fine_layout, experts, top_k
        if self._names and shape != (self.layout, self.fine_layout, self.experts, self.top_k):
            raise ConfigError(
                f"Layer {name} has other experts than the layers before it ({experts} experts, "
                f"top {top_k}, rows of {layout.row_bytes} bytes); one pool cannot hold both. Serve "
                "this model with pool=all and without packs."
            )
        self.layout, self.fine_layout, self.experts, self.top_k = shape
        self._names[layer] = name
        return LayerRows(self, layer)

    def again(self, config: MoetConfig) -> "ResidencyBuild":
        """Return a build of the same layers with other settings, whose rows packs hold.

        Raises:
            ConfigError: The packs do not hold every layer.
        """
        other = ResidencyBuild(config, self.rank)
        other._fine_of_packs = self._fine_of_packs or self.fine_layout
        fine = other._fine_of_packs if config.fine is not None else None
        for layer, name in self._names.items():
            other.add_layer(name, layer, self.layout, self.experts, self.top_k, fine)
        missing = [layer for layer in other.layers if other.needs(layer)]
        if missing or (config.fine is not None and fine is None):
            raise ConfigError(
                f"A pool can only be opened again from complete packs; layers {missing} are not "
                f"in packs={config.packs!r}, or the fine tier is not."
            )
        return other

    def tiers(self) -> list[TierRows]:
        """Return the base tier's rows, and the fine tier's if there are any.

        The first call looks for packs; all layers have been announced by then.
        """
        if not self._tiers:
            about = self.config, self.rank
            size = self.layers, self.experts
            self._tiers.append(TierRows(*about, "base", self.layout, *size))
            if self.fine_layout is not None:
                self._tiers.append(TierRows(*about, "fine", self.fine_layout, *size))
        return self._tiers

    def needs(self, layer: int) -> bool:
        """Say whether a layer's rows must come from the checkpoint."""
        return any(tier.needs(layer) for tier in self.tiers())

    def finish(self) -> ResidentExperts | None:
        """Return the resident experts, ready to serve; None for a rank without any.

        Raises:
            ConfigError: A pool or an arena that is too small.
            PackError: A pack that cannot be read.
        """
        if not self._names:
            return None
        started = time.perf_counter()
        base, *fine = self.tiers()
        if self.config.pool == "auto":
            shape = least_pool(*self._sizes(), self.layout)
        else:
            shape = pool_shape("pool", self.config.pool, *self._sizes(), self.layout)
        store = base.store(shape)
        fine_tier = self._fine(fine[0]) if fine else None
        self.open_seconds = time.perf_counter() - started
        resident = ResidentExperts(
            shape,
            store,
            self.rank.device,
            self.rank.agree,
            self.config.miss_tolerance,
            fine_tier,
            self.rank.padded,
        )
        op.bind([self._names[layer] for layer in self.layers], resident)
        return resident

    def _sizes(self) -> tuple[tuple[int, ...], int, int]:
        return self.layers, self.experts, self.top_k

    def _fine(self, rows: TierRows) -> FineTier:
        config = self.config
        assert config.fine is not None
        shape = pool_shape("fine", config.fine, *self._sizes(), rows.layout, is_fine=True)
        gate = None
        if config.gate != "off":
            assert config.tau is not None
            settings = GateSettings(
                signal=config.gate,
                tau=config.tau,
                budget=config.gate_budget,
                passes=config.gate_passes,
                audit=config.gate_audit or 0.0,
            )
            gate = Gate(settings)
        return FineTier(
            Tier(shape, rows.store(shape), self.rank.device),
            gate=gate,
            prompts=config.prompts == "fine",
            by_use=gate is None,
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
