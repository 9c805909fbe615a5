"""Layers of routed experts on a GPU, without vLLM: steps of a few tokens run in CUDA graphs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from small_model import random_rows
from torch import Tensor

from moet_core.gate import Gate, GateSettings, Reading
from moet_core.row import row_layout
from moet_kernels.experts import experts
from moet_store import PackReader, PackWriter, bytes_identity, expert_spec
from moet_store.engines import Engine
from moet_vllm.residency.pinning import pin
from moet_vllm.residency.resident import FineTier, PoolShape, ResidentExperts
from moet_vllm.residency.sampled import reading_of
from moet_vllm.residency.stores import HostStore, PackStore, PinnedStore
from moet_vllm.residency.tier import Tier

DEVICE = torch.device("cuda")
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, VOCABULARY = 256, 128, 32, 4, 64
LAYERS = (1, 2, 4, 5, 6)
LAYOUTS = {name: row_layout(name, HIDDEN, INTERMEDIATE) for name in ("w2", "fp4-mx")}
GRAPH_SIZES = (1, 2, 4)

RunLayer = Callable[[int, Tensor, Tensor, Tensor, float | None], Tensor]


class GraphModel:
    """Routers and rows with random weights.

    Attributes:
        stores: Those that were opened since `close`.
    """

    def __init__(self, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        routers = torch.randn(len(LAYERS), HIDDEN, EXPERTS, generator=random)
        self.routers = routers.to(DEVICE)
        self.head = torch.randn(HIDDEN, VOCABULARY, generator=random).to(DEVICE)
        self.rows = {
            name: random_rows(len(LAYERS), layout, random, EXPERTS)
            for name, layout in LAYOUTS.items()
        }
        self._on_device = {name: rows.to(DEVICE) for name, rows in self.rows.items()}
        self._every = torch.arange(EXPERTS, dtype=torch.int32, device=DEVICE)
        self.stores: list[HostStore] = []

    def close(self) -> None:
        """Close the stores: locked memory must be unlocked before it is freed."""
        torch.cuda.synchronize()
        while self.stores:
            self.stores.pop().close()

    def forward(self, x: Tensor, run_layer: RunLayer) -> Tensor:
        """Run one pass over x [T, H]; nothing in it waits for the device."""
        for number in range(len(LAYERS)):
            # No matrix product: its bits may depend on where it runs.
            scores = (x[:, :, None] * self.routers[number]).sum(1)
            weights, ids = scores.softmax(1).topk(TOP_K)
            x = x + run_layer(number, x.bfloat16(), weights, ids.int(), None).float()
            x = x / x.norm(dim=1, keepdim=True)
        return x

    def alone(self, x: Tensor, codec: str = "w2") -> Tensor:
        """Return what x gives where every expert is present."""

        def run_layer(
            number: int, x: Tensor, weights: Tensor, ids: Tensor, limit: float | None
        ) -> Tensor:
            rows = self._on_device[codec][number]
            sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE}
            about: dict[str, Any] = {"codec": codec, "swiglu_limit": limit, **sizes}
            return experts(x, weights, ids, rows, self._every, **about)

        return self.forward(padded(x), run_layer)[: len(x)]

    def pinned(self, codec: str = "w2") -> PinnedStore:
        rows = self.rows[codec]
        store = PinnedStore(LAYERS, EXPERTS, rows.shape[2], pin)
        for number, layer in enumerate(LAYERS):
            for expert in range(EXPERTS):
                store.row((layer, expert))[:] = memoryview(rows[number, expert].numpy())
        self.stores.append(store)
        return store

    def write_pack(self, folder: Path) -> Path:
        spec = expert_spec(
            LAYOUTS["w2"], checkpoint=bytes_identity(b"graph"), layers=LAYERS, experts=EXPERTS
        )
        with PackWriter(folder, spec) as writer:
            for number, layer in enumerate(LAYERS):
                writer.write_layer(layer, [row.numpy() for row in self.rows["w2"][number]])
        return writer.path

    def packed(self, pack: Path, arena: int, engine: Engine | None = None) -> PackStore:
        reader = PackReader([pack], engine=engine or "auto")
        store = PackStore(reader, staging=16, arena_rows=arena, pin=pin)
        self.stores.append(store)
        return store


class Serving:
    """A model over a pool, as an engine serves it: captured graphs, padded batches, repairs."""

    def __init__(
        self, model: GraphModel, slots: int, store: HostStore, fine: FineTier | None = None
    ) -> None:
        self.model = model
        shape = pool_shape("w2", slots)
        self.resident = ResidentExperts(shape, store, DEVICE, fine=fine, padded=64)
        self.inputs = {size: torch.zeros(size, HIDDEN, device=DEVICE) for size in GRAPH_SIZES}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.outputs: dict[int, Tensor] = {}
        for size in GRAPH_SIZES:
            self._forward(self.inputs[size])  # compiles the kernels, which no graph can hold
            self.graphs[size] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[size]):
                self.outputs[size] = self._forward(self.inputs[size])

    def step(self, x: Tensor, *, prompt: bool = False) -> Tensor:
        """Run one step of x [T, H] and return its result."""
        size = next((size for size in GRAPH_SIZES if size >= len(x)), len(x))
        inputs = self.inputs.get(size, x)
        inputs[: len(x)] = x  # behind it, what earlier steps left

        def run() -> Tensor:
            if size not in self.graphs or self.resident.is_streaming:
                return self._forward(inputs)
            self.graphs[size].replay()
            return self.outputs[size].clone()

        output = self.resident.step(
            run, len(x), lambda: None, prompt=prompt, read=lambda out: self._read(out[: len(x)])
        )
        return output[: len(x)]

    def _forward(self, x: Tensor) -> Tensor:
        return self.model.forward(x, self.resident.run_layer)

    def _read(self, output: Tensor) -> Reading:
        return reading_of("max_prob", output @ self.model.head, None)


def pool_shape(codec: str, slots: int) -> PoolShape:
    total = len(LAYERS) * EXPERTS
    ring = 0 if slots >= total and codec == "w2" else 8
    sizes = {"layers": LAYERS, "experts": EXPERTS, "top_k": TOP_K}
    return PoolShape(**sizes, row=LAYOUTS[codec], slots=slots, ring=ring)


def fine_tier(model: GraphModel, slots: int, tau: float) -> FineTier:
    tier = Tier(pool_shape("fp4-mx", slots), model.pinned("fp4-mx"), DEVICE)
    return FineTier(tier, gate=Gate(GateSettings(tau=tau, passes=0)))


def padded(x: Tensor) -> Tensor:
    """Return x as a graph would take it, with other rows behind it."""
    size = next((size for size in GRAPH_SIZES if size >= len(x)), len(x))
    return torch.cat([x, torch.ones(size - len(x), HIDDEN, device=DEVICE)])


def tokens(count: int, seed: int) -> Tensor:
    """Return input for so many tokens, float32 [count, H]."""
    x = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return (x / x.norm(dim=1, keepdim=True)).to(DEVICE)
