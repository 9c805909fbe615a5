"""Measure steps over a pool on a GPU, without vLLM, into a result file.

    PYTHONPATH=bench python -m residency.gpu_steps FILE

Layers of routed experts at the width of GLM-5.2 follow each other, with nothing between them but
routing: what is measured is residency alone, without attention to hide behind.

- Streamed: a prompt of 8,192 tokens over pools that hold a part of the experts, against computing
  with all of them present and against copying the absent ones once.
- Decode: steps in a CUDA graph over a pool that holds all experts, for which nothing waits, and
  over one that only holds what the steps want, which must be checked after each.
- Repaired: steps that miss one expert of each layer.
"""

import argparse
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moet_cli.bench import run_result
from moet_core.results import Measurement, measurement, write_result
from moet_core.row import row_layout
from moet_vllm.residency.pinning import pin
from moet_vllm.residency.resident import ResidentExperts
from moet_vllm.residency.sizing import ring_rows
from moet_vllm.residency.stores import PinnedStore
from moet_vllm.residency.tier import PoolShape

HIDDEN, INTERMEDIATE, TOP_K = 6144, 2048, 8


class Layers:
    """Routers and pinned rows of random weights.

    Args:
        layers: Number of layers.
        experts: Experts of each.
        device: Where they run.
    """

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        self.layers, self.experts, self.device = layers, experts, device
        self.row = row_layout("w2", HIDDEN, INTERMEDIATE)
        random = torch.Generator(device).manual_seed(0)
        options: dict[str, Any] = {"generator": random, "device": device}
        self.routers = torch.randn(layers, HIDDEN, experts, **options).bfloat16()
        is_gpu = device.type == "cuda"
        self.store = PinnedStore(
            range(layers), experts, self.row.row_bytes, pin if is_gpu else None
        )
        for layer in range(layers):
            for expert in range(experts):
                row = torch.randint(0, 256, (self.row.row_bytes,), dtype=torch.uint8, **options)
                for part in (self.row.scales13, self.row.scales2):
                    row[part.slice] = 119
                row[self.row.payload_bytes :] = 0
                target = torch.frombuffer(self.store.row((layer, expert)), dtype=torch.uint8)
                target.copy_(row)

    def every(self) -> list[tuple[int, int]]:
        """Return the keys of all experts."""
        return [(layer, expert) for layer in range(self.layers) for expert in range(self.experts)]

    def resident(self, slots: int) -> ResidentExperts:
        """Return an empty pool of so many slots."""
        ring = 0 if slots == self.layers * self.experts else ring_rows(slots, self.experts)
        about: dict[str, Any] = {"experts": self.experts, "top_k": TOP_K, "row": self.row}
        shape = PoolShape(layers=tuple(range(self.layers)), slots=slots, ring=ring, **about)
        return ResidentExperts(shape, self.store, self.device)

    def forward(self, x: Tensor, resident: ResidentExperts) -> Tensor:
        """Run all layers on x bfloat16 [T, H]."""
        for number in range(self.layers):
            weights, ids = (x @ self.routers[number]).float().softmax(1).topk(TOP_K)
            y = resident.run_layer(number, x, weights, ids.int(), None)
            x = torch.nn.functional.rms_norm(x + y, (HIDDEN,))
        return x

    def tokens(self, count: int, seed: int) -> Tensor:
        """Return input bfloat16 [count, H]."""
        random = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(count, HIDDEN, generator=random, device=self.device).bfloat16()


def main() -> None:
    """Write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=8192, help="of the streamed prompt")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="of decoding, for each sample")
    args = parser.parse_args()
    started = datetime.now(UTC)
    layers = Layers(args.layers, args.experts, torch.device("cuda"))
    found = streamed(layers, args.tokens, args.samples)
    for batch in (1, 4, 8):
        found += decoding(layers, batch, args.samples, args.steps)
    notes = (
        f"{args.layers} layers of {args.experts} experts, hidden {HIDDEN}, intermediate "
        f"{INTERMEDIATE}, top {TOP_K}, rows of {layers.row.row_bytes} bytes at 2 bits, pinned",
        f"prompt of {args.tokens} tokens; {args.steps} decode steps a sample",
    )
    write_result(args.file, run_result("residency-gpu", started, found, notes=notes))
    for one in found:
        print(f"{one.name}: {one.median:.4g} {one.unit} ({one.min:.4g} to {one.max:.4g})")


def streamed(layers: Layers, tokens: int, samples: int) -> list[Measurement]:
    """Time a prompt over pools of a part of the experts, and what bounds it."""
    x = layers.tokens(tokens, 1)
    wanted, compute = with_all(layers, x, samples)
    found = [measurement("prompt, all experts present", "ms", compute)]
    for name, share in (("a half", 0.5), ("a quarter", 0.25), ("an eighth", 0.125)):
        torch.cuda.empty_cache()
        found += with_part(layers, x, wanted, (name, share), min(compute), samples)
    return found


def with_all(layers: Layers, x: Tensor, samples: int) -> tuple[Tensor, list[float]]:
    """Return the result of a prompt over a pool of all experts, and the times it takes."""
    resident = layers.resident(layers.layers * layers.experts)
    resident.preload(layers.every())
    wanted = step(layers, resident, x)
    return wanted, timed(lambda: step(layers, resident, x), samples)


def with_part(
    layers: Layers,
    x: Tensor,
    wanted: Tensor,
    part: tuple[str, float],
    compute: float,
    samples: int,
) -> list[Measurement]:
    """Time a prompt over a pool of a part of the experts."""
    name, share = part
    every = layers.every()
    resident = layers.resident(int(len(every) * share))
    held = set(every[:: round(1 / share)])
    resident.preload([key for key in every if key in held])
    absent = [key for key in every if key not in held]
    if not torch.equal(step(layers, resident, x), wanted):
        raise SystemExit(f"the streamed step over {name} of the experts has other bits")
    times = timed(lambda: step(layers, resident, x), samples)
    copies = timed(lambda: copy(layers, resident, absent), samples)
    bound = max(compute, min(copies))
    shares = [bound / value for value in times]
    return [
        measurement(f"prompt, pool of {name}: streamed", "ms", times),
        measurement(f"prompt, pool of {name}: copying the absent experts", "ms", copies),
        measurement(f"prompt, pool of {name}: share of the bound", "fraction", shares),
        measurement(f"prompt, pool of {name}: ring", "rows", [resident.shape.ring]),
    ]


def step(layers: Layers, resident: ResidentExperts, x: Tensor) -> Tensor:
    """Run a prompt as one step."""
    return resident.step(
        lambda: layers.forward(x, resident), len(x), lambda: None, prompt=True
    ).clone()


def copy(layers: Layers, resident: ResidentExperts, keys: list[tuple[int, int]]) -> None:
    """Copy rows into the ring, one over the other, as fast as they come."""
    pool = resident.pool
    for number, key in enumerate(keys):
        pool.place(pool.slots + number % pool.ring, layers.store.row(key))
    pool.copies.wait()


def decoding(layers: Layers, batch: int, samples: int, steps: int) -> list[Measurement]:
    """Time decode steps that never miss, that could, and that do."""
    x = layers.tokens(batch, 2)
    total = layers.layers * layers.experts
    found = []
    routed = routing(layers, x)
    for name, slots, held in (
        ("all experts", total, layers.every()),
        ("a pool that holds what they want", total - 8, routed),
    ):
        resident = layers.resident(slots)
        resident.preload(held)
        run = captured(layers, resident, x)
        resident.step(run, batch, lambda: None)
        passes = resident.counts.passes

        def many(resident: ResidentExperts = resident, run: Callable[[], Tensor] = run) -> None:
            for _ in range(steps):
                resident.step(run, batch, lambda: None)

        each = [value / steps for value in timed(many, samples)]
        found.append(measurement(f"decode of {batch} over {name}", "ms a step", each))
        if resident.counts.passes - passes != (samples + 1) * steps:
            raise SystemExit("steps that want what is resident were repaired")
        del resident, run
        torch.cuda.empty_cache()
    return found + repairs(layers, x, routed, samples)


def repairs(
    layers: Layers, x: Tensor, routed: list[tuple[int, int]], samples: int
) -> list[Measurement]:
    """Time steps that lack one expert of each layer."""
    missed = [next(key for key in routed if key[0] == layer) for layer in range(layers.layers)]
    times, passes = [], []
    for _ in range(samples):
        resident = layers.resident(layers.layers * layers.experts - 8)
        resident.preload([key for key in routed if key not in missed])
        run = captured(layers, resident, x)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        resident.step(run, len(x), lambda: None)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begun))
        passes.append(float(resident.counts.passes))
        del resident, run
        torch.cuda.empty_cache()
    name = f"decode of {len(x)} that misses {len(missed)} experts or more"
    return [measurement(name, "ms a step", times), measurement(f"{name}: passes", "count", passes)]


def captured(layers: Layers, resident: ResidentExperts, x: Tensor) -> Callable[[], Tensor]:
    """Return a pass over x as a CUDA graph."""
    layers.forward(x, resident)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layers.forward(x, resident)

    def run() -> Tensor:
        graph.replay()
        return output

    return run


def routing(layers: Layers, x: Tensor) -> list[tuple[int, int]]:
    """Return what x is routed to where every expert is present."""
    resident = layers.resident(layers.layers * layers.experts)
    resident.base.preload(layers.every())
    resident.step(lambda: layers.forward(x, resident), len(x), lambda: None)
    return [(int(layer), int(e)) for layer, e in np.argwhere(resident.pool.take_wanted())]


def timed(call: Callable[[], object], samples: int) -> list[float]:
    """Return how long a call takes until the device is done, in ms; the first call is left out."""
    found = []
    for _ in range(samples + 1):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - begun))
    return found[1:]


if __name__ == "__main__":
    main()
