"""Whole layers in the emulator, from routing to output, against their stated arithmetic."""

from pathlib import Path

import numpy as np
import pytest
import torch

from moet_core.row import decode_row, encode_expert, row_layout
from moet_core.samples import typical_source
from moet_core.sources import Nvfp4Source
from moet_kernels import arch, experts
from moet_kernels.portable.tier import Tier
from moet_kernels.sm120 import questions, trust
from moet_kernels.sm120.activations import dequantise, quantise
from moet_kernels.sm120.emulated import EmulatedDriver

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
    want = stated(x, weights, ids, base, fine, bfloat16=layer.bfloat16)
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


@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 16])
def test_tokens_and_absent_experts(layer, tokens):
    base = tier("w2", 256, 128, [2, -1, 0, 3, -1, 1])
    check(layer, *batch(tokens, 256, 4, 6, seed=tokens), base)
    assert layer.driver.launches == ["prepare", "bf16_gate_up", "bf16_down", "combine"]


@pytest.mark.parametrize("tokens", [2, 9])
def test_activations_in_e4m3(layer, tokens):
    base = tier("w2", 256, 128, [2, -1, 0, 3, -1, 1])
    check(layer.quantising(), *batch(tokens, 256, 4, 6, seed=tokens), base)
    assert layer.driver.launches == ["prepare", "w2_gate_up", "w2_down", "combine"]


@pytest.mark.parametrize("family_of_w2", ["bf16", "w2"])
@pytest.mark.parametrize(("codec", "family"), [("fp4-mx", "fp4"), ("fp4-nv", "nv")])
def test_two_tiers(layer, codec, family, family_of_w2):
    base = tier("w2", 192, 320, [0, 1, 2, 3, -1, -1])
    fine = tier(codec, 192, 320, [-1, 1, -1, -1, 0, -1], seed=500)
    if family_of_w2 == "w2":
        layer = layer.quantising()
    check(layer, *batch(5, 192, 3, 6), base, fine)
    assert layer.driver.launches == [
        "prepare",
        f"{family_of_w2}_gate_up_k64",
        f"{family}_gate_up_k64",
        f"{family_of_w2}_down_k64",
        f"{family}_down_k64",
        "combine",
    ]


@pytest.mark.parametrize("codec", ["w2", "w2 in E4M3", "fp4-mx", "fp4-nv"])
def test_a_token_that_is_not_a_number_stays_one(layer, codec):
    if codec == "w2 in E4M3":
        codec, layer = "w2", layer.quantising()
    base = tier(codec, 128, 64, [0, 1, 2])
    x, weights, ids = batch(3, 128, 2, 3)
    whole = layer.expert_layer(x, weights, ids, base, None, swiglu_limit=LIMIT)
    x[1, 70] = torch.nan
    out = layer.expert_layer(x, weights, ids, base, None, swiglu_limit=LIMIT)
    assert out[1].isnan().all()
    assert torch.equal(out[::2], whole[::2])


def test_one_expert_for_all_of_sixteen_tokens(layer):
    base = tier("w2", 128, 128, [0])
    check(layer, *batch(16, 128, 1, 1), base)


def test_a_token_alone_and_in_other_slots_has_the_same_bits(layer):
    base = tier("w2", 256, 128, [0, 1, 2, 3])
    x, weights, ids = batch(16, 256, 2, 4)
    together = check(layer, x, weights, ids, base)
    order = torch.tensor([3, 1, 0, 2])
    moved = Tier(base.pool[order], torch.argsort(order).int(), base.layout)
    for token in (0, 7, 15):
        one = slice(token, token + 1)
        alone = layer.expert_layer(x[one], weights[one], ids[one], moved, None, swiglu_limit=LIMIT)
        assert torch.equal(alone[0], together[token])


def test_a_streamed_layer_has_the_same_bits(layer):
    base = tier("w2", 128, 64, [0, 1, 2, 3])
    x, weights, ids = batch(5, 128, 3, 4)
    whole = layer.expert_layer(x, weights, ids, base, None, swiglu_limit=LIMIT)
    parts = torch.zeros(15, 128)
    for present in ([0, 2], [1, 3]):
        some = torch.full((4,), -1, dtype=torch.int32)
        some[present] = base.slot_of[present]
        layer.add_parts(parts, x, ids, base._replace(slot_of=some), None, swiglu_limit=LIMIT)
    combined = experts.combine_parts(parts, weights, torch.bfloat16, backend="reference")
    assert torch.equal(combined, whole)


def test_shards_add_up_to_the_whole(layer):
    """Each rank's row holds its columns; the sum of ranks is the layer, up to rounding."""
    shapes = [(256, 128)] * 2 + [(128, 256)]
    sources = [typical_source("fp32", *shape, seed=i) for i, shape in enumerate(shapes)]
    x, weights, ids = batch(3, 128, 1, 1)
    total = np.zeros((3, 128))
    for rank in range(2):
        row = torch.from_numpy(encode_expert("w2", *sources, rank=rank, size=2))[None]
        shard = Tier(row, torch.zeros(1, dtype=torch.int32), row_layout("w2", 128, 128))
        total += check(layer, x, weights, ids, shard).double().numpy()
    row = torch.from_numpy(encode_expert("w2", *sources))[None]
    whole = Tier(row, torch.zeros(1, dtype=torch.int32), row_layout("w2", 128, 256))
    want = check(layer, x, weights, ids, whole).double().numpy()
    assert np.abs(total - want).max() <= 2.0**-6 * np.abs(want).max()


def test_a_layer_of_real_width(layer):
    """GLM-5.2's hidden size, a quarter of its experts' columns."""
    base = tier("w2", 6144, 512, [0, 1])
    check(layer, *batch(2, 6144, 2, 2), base)


@pytest.mark.skipif(not TINYMOE.exists(), reason="TinyMoE lies in another package")
def test_tinymoes_layer(layer):
    safetensors = pytest.importorskip("safetensors")
    routed = 12  # of 64: encoding takes the time
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
    arguments = batch(7, 128, 6, routed)
    # the reference keeps bfloat16 activations; E4M3 ones cost a few percent
    for fine_tier, largest in ((None, 2.0**-8), (fine, 0.08)):
        out = check(layer, *arguments, base, fine_tier)
        reference = experts.experts(
            *arguments,
            base.pool,
            base.slot_of,
            hidden=128,
            intermediate=64,
            fine=fine_tier,
            swiglu_limit=LIMIT,
        )
        assert (out - reference).float().norm() <= largest * reference.float().norm()
    check(layer.quantising(), *arguments, base)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64])
def test_ids_of_any_size(layer, dtype):
    base = tier("w2", 128, 64, [0, 1, 2])
    x, weights, ids = batch(3, 128, 2, 3)
    want, got = (
        layer.expert_layer(x, weights, i, base, None, swiglu_limit=LIMIT)
        for i in (ids, ids.to(dtype))
    )
    assert torch.equal(want, got)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_operation_dispatches(monkeypatch, layer, dtype):
    monkeypatch.setattr(arch, "capability", lambda _device: (12, 0))
    monkeypatch.setattr(trust, "layer_on", lambda _device: layer)
    base = tier("w2", 128, 64, [0, -1, 1])
    x, weights, ids = batch(2, 128, 2, 3)
    missing = torch.zeros(1, dtype=dtype)
    out = experts.experts(
        x,
        weights,
        ids.to(dtype),
        base.pool,
        base.slot_of,
        hidden=128,
        intermediate=64,
        swiglu_limit=LIMIT,
        missing=missing,
    )
    want = stated(x, weights, ids, base, None)
    assert np.abs(out.double().numpy() - want).max() <= 2.0**-8 * np.abs(want).max()
    assert missing.item() == (1 if (ids == 1).any() else 0)
    assert layer.driver.launches[0] == "prepare"
    parts = torch.zeros(4, 128)
    experts.add_parts(
        parts, x, ids, base.pool, base.slot_of, hidden=128, intermediate=64, swiglu_limit=LIMIT
    )
    sums = (parts.view(2, 2, 128) * weights[..., None]).sum(1)
    assert (sums - out.float()).abs().max() <= 2.0**-7 * out.float().abs().max()
    assert (parts[(ids == 1).flatten()] == 0).all()


def test_ids_of_no_expert_are_absent(layer):
    base = tier("w2", 128, 64, [0, 1])
    x, weights, ids = batch(2, 128, 2, 2)
    ids[0, 0], ids[1, 1] = 7, -3
    missing = torch.zeros(1, dtype=torch.int64)
    out = layer.expert_layer(x, weights, ids, base, None, swiglu_limit=LIMIT, missing=missing)
    known = torch.where((ids < 0) | (ids > 1), 0, ids)
    weights[0, 0] = weights[1, 1] = 0
    want = stated(x, weights, known, base, None)
    assert np.abs(out.double().numpy() - want).max() <= 2.0**-8 * np.abs(want).max()
    assert missing.item() == 2


@pytest.mark.parametrize("name", sorted(questions.QUESTIONS))
def test_the_self_test_passes_in_the_emulator(name, programs):
    flaw, _ = questions.QUESTIONS[name](EmulatedDriver(), programs(name))
    assert flaw is None


@pytest.mark.parametrize("bfloat16", [True, False])
def test_x_at_an_odd_place_is_moved(layer, bfloat16):
    layer = layer if bfloat16 else layer.quantising()
    base = tier("w2", 64, 64, [0])
    x, weights, ids = batch(1, 64, 1, 1)
    odd = torch.cat([x[0, :1], x[0]])[1:].view(1, 64)
    assert odd.data_ptr() % 8
    want, got = (
        layer.expert_layer(place, weights, ids, base, None, swiglu_limit=LIMIT)
        for place in (x, odd)
    )
    assert torch.equal(want, got)
