"""Writes checkpoints of random weights, on the GPU where there is one, as fast as the disk takes.

    PYTHONPATH=bench python -m served.models FOLDER [--shape glm --shape kimi]

Each shape is written twice: NAME routes evenly, NAME-skewed has a correction bias that sends
`SKEW` of the routings to a fifth of the experts. Both share every other shard.

Experts are random NVFP4 codes: uniform nibbles, e4m3 scales from 0.75 to 1.375, and tensor scales
that are powers of two, so that bf16 holds every weight exactly. Matrices keep the size of what
passes through them, and logits spread by `LOGITS`, so that the largest one is no accident of
rounding.
"""

import argparse
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from served.shapes import SHAPES, Shape, config

__all__ = ["HOT_SHARE", "SKEW", "hot_experts", "skewed_bias", "write_model"]

SKEW = 0.93
"""Share of the routings that the hot experts of a skewed layer serve."""

HOT_SHARE = 0.2
"""Share of a layer's experts that are hot."""

LOGITS = 3.0
"""Standard deviation of the logits."""

_NIBBLE_RMS = math.sqrt(sum(v * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)
_SCALES = (0x34, 0x3C)
"""Bytes of the e4m3 scales, from and below: 0.75 to 1.375."""

_DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}

DRAWING = 8
"""Dense matrices that are drawn at a time: a CPU draws each in one thread."""

Draw = Callable[[], Tensor]

Entry = tuple[str, str, tuple[int, ...]]
"""A tensor of a shard: name, safetensors dtype, shape."""


def write_model(folder: Path, shape: Shape, device: torch.device, seed: int = 0) -> None:
    """Write `folder` and `folder`-skewed; a folder that holds the same shape already stays.

    Args:
        folder: Where to.
        shape: The model's geometry.
        device: Where the random numbers are drawn; the weights depend on its type.
        seed: Seed of all weights.
    """
    skewed = folder.with_name(f"{folder.name}-skewed")
    record = json.dumps(msgspec.to_builtins(shape), indent=1)
    if _holds(folder, record) and _holds(skewed, record):
        return
    for path in (folder, skewed):
        path.mkdir(parents=True, exist_ok=True)
    shards: dict[str, list[str]] = {}

    def dense() -> None:
        name = "dense.safetensors"
        named = dict(_dense_tensors(shape, device, seed))
        with ThreadPoolExecutor(DRAWING) as drawing:
            drawn = drawing.map(lambda draw: draw(), named.values())
            shards[name] = _write_tensors(folder / name, dict(zip(named, drawn, strict=True)))

    def experts(layer: int) -> None:
        name = f"experts-{layer:02d}.safetensors"
        shards[name] = _write_experts(folder / name, shape, layer, device, seed)

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(dense)]
        jobs += [pool.submit(experts, layer) for layer in shape.expert_layers]
        for job in jobs:
            job.result()
    for name in shards:
        link = skewed / name
        link.unlink(missing_ok=True)
        os.link(folder / name, link)
    for path, skew in ((folder, False), (skewed, True)):
        biases = {
            f"model.layers.{layer}.mlp.gate.e_score_correction_bias": torch.from_numpy(
                skewed_bias(shape, layer, seed) if skew else np.zeros(shape.experts, np.float32)
            )
            for layer in shape.expert_layers
        }
        found = {**shards, "bias.safetensors": _write_tensors(path / "bias.safetensors", biases)}
        index = {name: shard for shard, names in found.items() for name in names}
        total = sum((path / shard).stat().st_size for shard in found)
        about = {"metadata": {"total_size": total}, "weight_map": index}
        (path / "model.safetensors.index.json").write_text(json.dumps(about))
        (path / "config.json").write_text(json.dumps(config(shape), indent=1))
        (path / "shape.json").write_text(record)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # engines are about to need it


def hot_experts(shape: Shape, layer: int, seed: int = 0) -> list[int]:
    """Return the experts that a skewed layer prefers, ascending."""
    count = round(HOT_SHARE * shape.experts)
    choice = np.random.default_rng([seed, layer]).choice(shape.experts, count, replace=False)
    return sorted(int(expert) for expert in choice)


def skewed_bias(shape: Shape, layer: int, seed: int = 0) -> np.ndarray:
    """Return a correction bias float32 [experts] that routes `SKEW` of all pairs to hot experts.

    Router logits are drawn as unit normal, which is what the random router makes of a normed
    token; the bias is found by bisection over the same draws.
    """
    hot = np.zeros(shape.experts, bool)
    hot[hot_experts(shape, layer, seed)] = True
    logits = np.random.default_rng([seed, layer, 1]).standard_normal((4096, shape.experts))
    scores = 1 / (1 + np.exp(-logits))

    def share(bias: float) -> float:
        ranked = np.argsort(-(scores + bias * hot), axis=1)[:, : shape.top_k]
        return float(hot[ranked].mean())

    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) < SKEW else (low, middle)
    return np.where(hot, np.float32(high), np.float32(0)).astype(np.float32)


def _holds(folder: Path, record: str) -> bool:
    path = folder / "shape.json"
    return path.is_file() and path.read_text() == record


def _generator(device: torch.device, seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest[:7], "little"))


def _dense_tensors(shape: Shape, device: torch.device, seed: int) -> Iterator[tuple[str, Draw]]:
    """Yield all tensors but those of the routed experts and the routers' biases."""

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> tuple[str, Draw]:
        def draw() -> Tensor:
            values = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
            values.normal_(0, gain / columns**0.5, generator=_generator(device, seed, name))
            return values.cpu()

        return f"{name}.weight", draw

    def ones(name: str, size: int) -> tuple[str, Draw]:
        return f"{name}.weight", partial(torch.ones, size, dtype=torch.bfloat16)

    def gated(name: str, width: int) -> Iterator[tuple[str, Draw]]:
        yield matrix(f"{name}.gate_proj", width, shape.hidden)
        yield matrix(f"{name}.up_proj", width, shape.hidden)
        yield matrix(f"{name}.down_proj", shape.hidden, width)

    hidden, heads = shape.hidden, shape.heads
    yield matrix("model.embed_tokens", shape.vocabulary, hidden, gain=hidden**0.5)
    yield matrix("lm_head", shape.vocabulary, hidden, gain=LOGITS)
    yield ones("model.norm", hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        yield ones(f"{prefix}.input_layernorm", hidden)
        yield ones(f"{prefix}.post_attention_layernorm", hidden)
        yield matrix(f"{attention}.q_a_proj", shape.query_rank, hidden)
        yield ones(f"{attention}.q_a_layernorm", shape.query_rank)
        yield matrix(f"{attention}.q_b_proj", heads * (shape.nope + shape.rope), shape.query_rank)
        yield matrix(f"{attention}.kv_a_proj_with_mqa", shape.key_rank + shape.rope, hidden)
        yield ones(f"{attention}.kv_a_layernorm", shape.key_rank)
        yield matrix(f"{attention}.kv_b_proj", heads * (shape.nope + shape.value), shape.key_rank)
        yield matrix(f"{attention}.o_proj", hidden, heads * shape.value)
        if shape.indexer is not None:
            indexer = f"{attention}.indexer"
            width = shape.indexer.heads * shape.indexer.head_dim
            yield matrix(f"{indexer}.wq_b", width, shape.query_rank)
            yield matrix(f"{indexer}.wk", shape.indexer.head_dim, hidden)
            yield matrix(f"{indexer}.weights_proj", shape.indexer.heads, hidden)
            yield ones(f"{indexer}.k_norm", shape.indexer.head_dim)
            size = shape.indexer.head_dim
            yield f"{indexer}.k_norm.bias", partial(torch.zeros, size, dtype=torch.bfloat16)
        if layer < shape.dense_layers:
            yield from gated(f"{prefix}.mlp", shape.dense)
        else:
            yield from gated(f"{prefix}.mlp.shared_experts", shape.intermediate)
            yield matrix(f"{prefix}.mlp.gate", shape.experts, hidden)


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> list[str]:
    """Write a shard of whole tensors; return their names."""
    entries = [(name, _DTYPES[part.dtype], tuple(part.shape)) for name, part in tensors.items()]
    blocks = [part.contiguous().view(-1).view(torch.uint8) for part in tensors.values()]
    return _write_shard(path, entries, blocks)


def _write_experts(
    path: Path, shape: Shape, layer: int, device: torch.device, seed: int
) -> list[str]:
    """Write the routed experts of a layer; return the names of their tensors.

    Nibbles of all matrices come first, then all scales, then the two numbers of each matrix: three
    blocks that are drawn and copied whole.
    """
    sizes = {
        "gate_proj": (shape.intermediate, shape.hidden),
        "up_proj": (shape.intermediate, shape.hidden),
        "down_proj": (shape.hidden, shape.intermediate),
    }
    names = [
        (f"model.layers.{layer}.mlp.experts.{expert}.{matrix}", *size)
        for expert in range(shape.experts)
        for matrix, size in sizes.items()
    ]
    entries: list[Entry] = []
    entries += [(f"{name}.weight", "U8", (rows, k // 2)) for name, rows, k in names]
    entries += [(f"{name}.weight_scale", "F8_E4M3", (rows, k // 16)) for name, rows, k in names]
    entries += [(f"{name}.weight_scale_2", "F32", ()) for name, _, _ in names]
    entries += [(f"{name}.input_scale", "F32", ()) for name, _, _ in names]
    weights = shape.experts * 3 * shape.hidden * shape.intermediate
    generator = _generator(device, seed, path.name)
    scale_2 = [2.0 ** round(math.log2(1 / (k**0.5 * _NIBBLE_RMS))) for _, _, k in names]
    tail = torch.tensor([*scale_2, *([1.0] * len(names))], dtype=torch.float32)

    def blocks() -> Iterator[Tensor]:
        for low, high, size in ((0, 256, weights // 2), (*_SCALES, weights // 16)):
            drawn = torch.empty(size, dtype=torch.uint8, device=device)
            yield drawn.random_(low, high, generator=generator).cpu()
        yield tail.view(torch.uint8)

    return _write_shard(path, entries, blocks())


def _write_shard(path: Path, entries: list[Entry], blocks: Any) -> list[str]:
    """Write a safetensors file whose payload is the blocks, one after the other."""
    widths = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}
    header: dict[str, Any] = {}
    at = 0
    for name, dtype, size in entries:
        end = at + widths[dtype] * math.prod(size)
        header[name] = {"dtype": dtype, "shape": list(size), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    written = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for block in blocks:
            file.write(memoryview(block.numpy()))
            written += block.nbytes
    if written != at:
        raise ValueError(f"{path}: wanted {at} bytes of tensors, wrote {written}")
    return [name for name, _, _ in entries]


def main() -> None:
    """Write the models from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", action="append", choices=list(SHAPES))
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in args.shape or ["glm", "kimi"]:
        started = time.perf_counter()
        write_model(args.folder / name, SHAPES[name], device)
        size = sum(path.stat().st_size for path in (args.folder / name).iterdir())
        print(f"{name}: {size / 1e9:.1f} GB in {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
