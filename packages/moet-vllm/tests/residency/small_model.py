"""A few layers of routed experts without vLLM, to run steps over a pool and over all experts."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from moet_core.row import row_layout
from moet_kernels.experts import experts
from moet_store import PackReader, PackWriter, bytes_identity, expert_spec
from moet_store.engines import Engine
from moet_vllm.residency.resident import PoolShape, ResidentExperts
from moet_vllm.residency.stores import HostStore, PackStore, PinnedStore

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 32, 32, 8, 2
MODEL_LAYERS = (1, 2, 4, 5)
LAYOUT = row_layout("w2", HIDDEN, INTERMEDIATE)

RunLayer = Callable[[int, Tensor, Tensor, Tensor, float | None], Tensor]


class SmallModel:
    """Routers and rows with random weights; a pass changes its input in place, as vLLM's does."""

    def __init__(self, seed: int = 0, layers: Sequence[int] = MODEL_LAYERS) -> None:
        random = torch.Generator().manual_seed(seed)
        count = len(layers)
        self.layers = tuple(layers)
        self.routers = torch.randn(count, HIDDEN, EXPERTS, generator=random)
        shape = (count, EXPERTS, LAYOUT.row_bytes)
        self.rows = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
        for section in (LAYOUT.scales13, LAYOUT.scales2):
            place = self.rows[:, :, section.slice]
            place.copy_(torch.randint(122, 126, place.shape, generator=random))
        self.rows[:, :, LAYOUT.payload_bytes :] = 0
        self.routings: list[list[int]] = []

    def forward(self, x: Tensor, run_layer: RunLayer) -> Tensor:
        """Run one pass over x [T, H]; x is used up."""
        self.routings = []
        for number in range(len(self.layers)):
            scores = (x @ self.routers[number]).softmax(1)
            weights, ids = scores.topk(TOP_K)
            self.routings.append(sorted(set(ids.flatten().tolist())))
            x += run_layer(number, x.bfloat16(), weights, ids, None).float()
            x /= x.norm(dim=1, keepdim=True)
        return x.clone()

    def alone(self, x: Tensor) -> Tensor:
        """Return what x gives where every expert is present."""

        def run_layer(
            number: int, x: Tensor, weights: Tensor, ids: Tensor, limit: float | None
        ) -> Tensor:
            slots = torch.arange(EXPERTS, dtype=torch.int32)
            sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE}
            return experts(x, weights, ids, self.rows[number], slots, swiglu_limit=limit, **sizes)

        return self.forward(x.clone(), run_layer)

    def write_pack(self, folder: Path) -> Path:
        spec = expert_spec(
            LAYOUT, checkpoint=bytes_identity(b"small"), layers=self.layers, experts=EXPERTS
        )
        with PackWriter(folder, spec) as writer:
            for number, layer in enumerate(self.layers):
                writer.write_layer(layer, [row.numpy() for row in self.rows[number]])
        return writer.path

    def pinned(self) -> PinnedStore:
        store = PinnedStore(self.layers, EXPERTS, LAYOUT.row_bytes)
        for number, layer in enumerate(self.layers):
            for expert in range(EXPERTS):
                store.row((layer, expert))[:] = memoryview(self.rows[number, expert].numpy())
        return store

    def packed(self, pack: Path, arena: int, engine: Engine | None = None) -> PackStore:
        reader = PackReader([pack], engine=engine or "auto")
        return PackStore(reader, staging=4, arena_rows=arena)

    def resident(
        self,
        slots: int,
        store: HostStore,
        *,
        ring: int = 4,
        agree: Callable[[int], int] | None = None,
        tolerance: int = 0,
    ) -> ResidentExperts:
        total = len(self.layers) * EXPERTS
        shape = PoolShape(
            layers=self.layers,
            experts=EXPERTS,
            top_k=TOP_K,
            row=LAYOUT,
            slots=slots,
            ring=0 if slots >= total else ring,
        )
        return ResidentExperts(shape, store, torch.device("cpu"), agree, tolerance)

    def step(self, resident: ResidentExperts, x: Tensor) -> Tensor:
        """Run one step of x [T, H] over a pool; its input is put back before each pass."""
        inputs = x.clone()
        return resident.step(
            lambda: self.forward(inputs, resident.run_layer),
            len(x),
            lambda: inputs.copy_(x),
        )


def tokens(count: int, seed: int) -> Tensor:
    """Return input for so many tokens, float32 [count, H]."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, HIDDEN, generator=random)
    return x / x.norm(dim=1, keepdim=True)
