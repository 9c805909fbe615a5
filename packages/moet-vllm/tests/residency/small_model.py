"""A few layers of routed experts without vLLM, to run steps over a pool and over all experts."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moet_core.gate import Reading
from moet_core.row import RowLayout, row_layout
from moet_kernels.experts import experts
from moet_store import PackReader, PackWriter, bytes_identity, expert_spec
from moet_store.engines import Engine
from moet_vllm.residency.resident import FineTier, PoolShape, ResidentExperts
from moet_vllm.residency.sampled import reading_of
from moet_vllm.residency.stores import HostStore, PackStore, PinnedStore
from moet_vllm.residency.tier import Tier

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 32, 32, 8, 2
MODEL_LAYERS = (1, 2, 4, 5)
LAYOUT = row_layout("w2", HIDDEN, INTERMEDIATE)
FINE_LAYOUT = row_layout("fp4-mx", HIDDEN, INTERMEDIATE)
VOCABULARY = 16

RunLayer = Callable[[int, Tensor, Tensor, Tensor, float | None], Tensor]


class SmallModel:
    """Routers and rows with random weights; a pass changes its input in place, as vLLM's does."""

    def __init__(self, seed: int = 0, layers: Sequence[int] = MODEL_LAYERS) -> None:
        random = torch.Generator().manual_seed(seed)
        count = len(layers)
        self.layers = tuple(layers)
        self.routers = torch.randn(count, HIDDEN, EXPERTS, generator=random)
        self.rows = random_rows(count, LAYOUT, random)
        self.head = torch.randn(HIDDEN, VOCABULARY, generator=random)
        self.fine_rows = random_rows(count, FINE_LAYOUT, random)
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

    def alone(self, x: Tensor, *, fine: bool = False) -> Tensor:
        """Return what x gives where every expert is present, at the base's or fine precision."""
        rows, codec = (self.fine_rows, "fp4-mx") if fine else (self.rows, "w2")

        def run_layer(
            number: int, x: Tensor, weights: Tensor, ids: Tensor, limit: float | None
        ) -> Tensor:
            slots = torch.arange(EXPERTS, dtype=torch.int32)
            sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE}
            about = {"codec": codec, "swiglu_limit": limit, **sizes}
            return experts(x, weights, ids, rows[number], slots, **about)

        return self.forward(x.clone(), run_layer)

    def read(self, output: Tensor, drafts: list[list[int]] | None = None) -> Reading:
        """Read the logits of a pass's output; `drafts` as for `reading_of`."""
        return reading_of("max_prob", output @ self.head, drafts)

    def write_pack(self, folder: Path, *, fine: bool = False) -> Path:
        layout, rows, tier = (
            (FINE_LAYOUT, self.fine_rows, "fine") if fine else (LAYOUT, self.rows, "base")
        )
        spec = expert_spec(
            layout,
            checkpoint=bytes_identity(b"small"),
            layers=self.layers,
            experts=EXPERTS,
            tier=tier,
        )
        with PackWriter(folder, spec) as writer:
            for number, layer in enumerate(self.layers):
                writer.write_layer(layer, [row.numpy() for row in rows[number]])
        return writer.path

    def pinned(self, *, fine: bool = False) -> PinnedStore:
        rows = self.fine_rows if fine else self.rows
        store = PinnedStore(self.layers, EXPERTS, rows.shape[2])
        for number, layer in enumerate(self.layers):
            for expert in range(EXPERTS):
                store.row((layer, expert))[:] = memoryview(rows[number, expert].numpy())
        return store

    def packed(self, pack: Path, arena: int, engine: Engine | None = None) -> PackStore:
        reader = PackReader([pack], engine=engine or "auto")
        return PackStore(reader, staging=4, arena_rows=arena)

    def shape(self, slots: int, *, ring: int = 4, fine: bool = False) -> PoolShape:
        total = len(self.layers) * EXPERTS
        return PoolShape(
            layers=self.layers,
            experts=EXPERTS,
            top_k=TOP_K,
            row=FINE_LAYOUT if fine else LAYOUT,
            slots=slots,
            ring=0 if slots >= total and not fine else ring,
        )

    def resident(
        self,
        slots: int,
        store: HostStore,
        *,
        ring: int = 4,
        agree: Callable[[int], int] | None = None,
        tolerance: int = 0,
        fine: FineTier | None = None,
        padded: int = 0,
    ) -> ResidentExperts:
        shape = self.shape(slots, ring=ring)
        device = torch.device("cpu")
        return ResidentExperts(shape, store, device, agree, tolerance, fine, padded)

    def fine_tier(self, slots: int, store: HostStore, **use: Any) -> FineTier:
        return FineTier(Tier(self.shape(slots, fine=True), store, torch.device("cpu")), **use)

    def step(
        self,
        resident: ResidentExperts,
        x: Tensor,
        *,
        prompt: bool = False,
        drafts: list[list[int]] | None = None,
    ) -> Tensor:
        """Run one step of x [T, H] over a pool; its input is put back before each pass."""
        inputs = x.clone()
        return resident.step(
            lambda: self.forward(inputs, resident.run_layer),
            len(x),
            lambda: inputs.copy_(x),
            prompt=prompt,
            read=partial(self.read, drafts=drafts),
        )


def random_rows(
    layers: int, layout: RowLayout, random: torch.Generator, experts: int = EXPERTS
) -> Tensor:
    """Return rows of random codes and moderate scales, uint8 [layers, experts, row_bytes]."""
    shape = (layers, experts, layout.row_bytes)
    rows = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
    for section in (layout.scales13, layout.scales2):
        place = rows[:, :, section.slice]
        place.copy_(torch.randint(122, 126, place.shape, generator=random))
    rows[:, :, layout.payload_bytes :] = 0
    return rows


def tokens(count: int, seed: int) -> Tensor:
    """Return input for so many tokens, float32 [count, H]."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, HIDDEN, generator=random)
    return x / x.norm(dim=1, keepdim=True)
