"""Whole layers in the emulator, from routing to output, against their stated arithmetic."""

import numpy as np
import pytest
import torch
from sm120_layers import (
    LIMIT,
    TINYMOE,
    batch,
    check,
    check_shards,
    check_tinymoe,
    stated,
    tier,
    tinymoe_tiers,
)

from moet_kernels import arch, experts
from moet_kernels.portable.tier import Tier
from moet_kernels.sm120 import questions, trust
from moet_kernels.sm120.emulated import EmulatedDriver


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
    check_shards(layer, "w2", batch(3, 128, 1, 1))


def test_a_layer_of_real_width(layer):
    """GLM-5.2's hidden size, a quarter of its experts' columns."""
    base = tier("w2", 6144, 512, [0, 1])
    check(layer, *batch(2, 6144, 2, 2), base)


@pytest.mark.skipif(not TINYMOE.exists(), reason="TinyMoE lies in another package")
def test_tinymoes_layer(layer):
    routed = 12  # of 64: encoding takes the time
    base, fine = tinymoe_tiers(routed)
    arguments = batch(7, 128, 6, routed)
    # E4M3 activations, the fine tier's, cost a few percent
    for fine_tier, largest in ((None, 2.0**-8), (fine, 0.08)):
        check_tinymoe(layer, arguments, base, fine_tier, largest)
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
