"""Layers for tests: random ones and TinyMoE's, and what is to come of them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from moet_core.row import decode_row, encode_expert, row_layout
from moet_core.samples import typical_source
from moet_core.sources import Nvfp4Source
from moet_kernels import experts
from moet_kernels.portable.tier import Tier
from moet_kernels.sm120.activations import dequantise, quantise
from moet_kernels.sm120.cases import DECODE

TINYMOE = Path(__file__).parents[3] / "moet-vllm/src/moet_vllm/tinymoe/checkpoint/model.safetensors"
LIMIT = 7.0


def rows_of(codec, hidden, intermediate, experts, seed=0):
    shapes = [(intermediate, hidden)] * 2 + [(hidden, intermediate)]
    sources = [
        [typical_source("fp32", *s, seed=seed + 9 * e + i) for i, s in enumerate(shapes)]
        for e in range(experts)
    ]
    return np.stack([encode_expert(codec, *three) for three in sources])


def batch(tokens, hidden, top_k, experts, seed=0):
    chance = torch.Generator().manual_seed(seed)
    x = 4 * torch.randn(tokens, hidden, generator=chance)
    ids = torch.rand(tokens, experts, generator=chance).topk(top_k).indices
    weights = torch.rand(tokens, top_k, generator=chance)
    return x.bfloat16(), weights, ids.int()


def rounded(x, codec, bfloat16=True):
    """Activations as rows of a codec take them."""
    x = x.astype(np.float32)
    if codec == "w2" and bfloat16:
        return torch.from_numpy(x).bfloat16().double().numpy()
    return dequantise(*quantise(x))


def stated(x, weights, ids, base, fine, limit=LIMIT, bfloat16=True):
    """The layer in float64, activations rounded as they are; parts too."""
    out, matrices = np.zeros(x.shape), {}
    for token, pair in np.ndindex(*ids.shape):
        expert = int(ids[token, pair])
        tier = fine if fine is not None and fine.slot_of[expert] >= 0 else base
        slot = int(tier.slot_of[expert])
        if slot < 0:
            continue
        if expert not in matrices:
            matrices[expert] = decode_row(tier.layout, tier.pool[slot].numpy())
        w13, w2 = matrices[expert]
        codec = tier.layout.codec
        value = rounded(x[token, None].float().numpy(), codec, bfloat16)[0]
        gate, up = np.split(w13 @ value, 2)
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        activated = rounded((gate / (1 + np.exp(-gate)) * up)[None], codec, bfloat16)[0]
        out[token] += float(weights[token, pair]) * (w2 @ activated)
    return out


def check(layer, x, weights, ids, base, fine=None):
    options = {
        "swiglu_limit": LIMIT,
        "missing": torch.zeros(1, dtype=torch.int32),
        "wanted": torch.zeros(len(base.slot_of), dtype=torch.uint8),
    }
    out = layer.expert_layer(x, weights, ids, base, fine, **options)
    bfloat16 = layer.bfloat16 and layer.tiling(ids) is DECODE
    want = stated(x, weights, ids, base, fine, bfloat16=bfloat16)
    # bfloat16 rounds the sum; an element within rounding of two E4M3 steps may take the other
    error = np.abs(out.double().numpy() - want).max(axis=1)
    assert (error <= 2.0**-8 * np.abs(want).max(axis=1)).all(), error / np.abs(want).max(axis=1)
    routed = np.unique(ids.numpy())
    present = base.slot_of.numpy() >= 0
    if fine is not None:
        present |= fine.slot_of.numpy() >= 0
    assert options["missing"].item() == (~present[routed]).sum()
    assert options["wanted"].nonzero()[:, 0].tolist() == routed.tolist()
    return out


def tier(codec, hidden, intermediate, slots, seed=0):
    slot_of = torch.tensor(slots, dtype=torch.int32)
    rows = rows_of(codec, hidden, intermediate, int(slot_of.max()) + 1, seed)
    return Tier(torch.from_numpy(rows), slot_of, row_layout(codec, hidden, intermediate))


def check_shards(layer, codec, arguments):
    """Each rank's row holds its columns; the sum of ranks is the layer, up to rounding."""
    shapes = [(256, 128)] * 2 + [(128, 256)]
    sources = [typical_source("fp32", *shape, seed=i) for i, shape in enumerate(shapes)]
    slot_of = torch.zeros(1, dtype=torch.int32)
    total = np.zeros(arguments[0].shape)
    for rank in range(2):
        row = torch.from_numpy(encode_expert(codec, *sources, rank=rank, size=2))[None]
        shard = Tier(row, slot_of, row_layout(codec, 128, 128))
        total += check(layer, *arguments, shard).double().numpy()
    row = torch.from_numpy(encode_expert(codec, *sources))[None]
    whole = Tier(row, slot_of, row_layout(codec, 128, 256))
    want = check(layer, *arguments, whole).double().numpy()
    assert np.abs(total - want).max() <= 2.0**-6 * np.abs(want).max()


def check_tinymoe(layer, arguments, base, fine, largest):
    """The layer against the reference, which keeps bfloat16 activations."""
    out = check(layer, *arguments, base, fine)
    reference = experts.experts(
        *arguments,
        base.pool,
        base.slot_of,
        hidden=128,
        intermediate=64,
        fine=fine,
        swiglu_limit=LIMIT,
    )
    assert (out - reference).float().norm() <= largest * reference.float().norm()


def tinymoe_tiers(routed):
    """The first experts of TinyMoE's first sparse layer: w2, and the checkpoint's own for four."""
    safetensors = pytest.importorskip("safetensors")
    rows = {"w2": [], "fp4-nv": []}  # base, and what the checkpoint holds
    with safetensors.safe_open(TINYMOE, "pt") as file:
        for expert in range(routed):
            sources = []
            for matrix in ("gate_proj", "up_proj", "down_proj"):
                name = f"model.layers.1.mlp.experts.{expert}.{matrix}"
                scale = file.get_tensor(f"{name}.weight_scale").view(torch.uint8).numpy()
                scale_2 = np.float32(file.get_tensor(f"{name}.weight_scale_2"))
                weight = file.get_tensor(f"{name}.weight").numpy()
                sources.append(Nvfp4Source(name, weight, scale, scale_2))
            for codec, found in rows.items():
                found.append(encode_expert(codec, *sources))
    tiers = {
        codec: Tier(torch.from_numpy(np.stack(found)), None, row_layout(codec, 128, 64))
        for codec, found in rows.items()
    }
    base = tiers["w2"]._replace(slot_of=torch.arange(routed, dtype=torch.int32))
    some = torch.where(torch.arange(routed) < 4, torch.arange(routed), -1).int()
    fine = tiers["fp4-nv"]._replace(slot_of=some)
    return base, fine
