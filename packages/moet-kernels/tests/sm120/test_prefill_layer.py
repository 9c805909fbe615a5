"""Whole prefill layers in the emulator, from routing to output, against their stated arithmetic."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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

from moet_core.row import row_layout
from moet_kernels import arch, experts
from moet_kernels.portable.tier import Tier
from moet_kernels.sm120 import layer as layers
from moet_kernels.sm120 import questions, trust
from moet_kernels.sm120.cases import PREFILL
from moet_kernels.sm120.emulated import EmulatedDriver
from moet_kernels.sm120.launches import Vectors, launch_mark, launch_sort, tiles_of

STEP = ["sort", "w2_gate_up_tiles", "w2_down_tiles_k64", "combine"]


@pytest.mark.parametrize("tokens", [17, 40])
def test_tokens_and_absent_experts(layer, tokens):
    base = tier("w2", 256, 128, [2, -1, 0, 3, -1, 1])
    check(layer, *batch(tokens, 256, 4, 6, seed=tokens), base)
    assert layer.driver.launches == ["mark", "sort", "w2_gate_up_tiles", "w2_down_tiles", "combine"]


@pytest.mark.parametrize(("codec", "family"), [("fp4-mx", "fp4"), ("fp4-nv", "nv")])
def test_two_tiers(layer, codec, family):
    base = tier("w2", 192, 320, [0, 1, 2, 3, -1, -1])
    fine = tier(codec, 192, 320, [-1, 1, -1, -1, 0, -1], seed=500)
    check(layer, *batch(19, 192, 3, 6), base, fine)
    assert layer.driver.launches == [
        "mark",
        "sort",
        "w2_gate_up_tiles_k64",
        f"{family}_gate_up_tiles_k64",
        "w2_down_tiles_k64",
        f"{family}_down_tiles_k64",
        "combine",
    ]


def test_few_tokens_of_many_experts_are_no_decode_step(layer):
    base = tier("w2", 64, 64, [*range(20)])
    check(layer, *batch(14, 64, 19, 20), base)
    assert layer.driver.launches[1] == "sort"


def test_one_expert_for_all(layer):
    """33 pairs are three tiles, one of which has a single vector."""
    check(layer, *batch(33, 128, 1, 1), tier("w2", 128, 128, [0]))


def test_a_token_alone_and_in_other_slots_has_the_same_bits(layer):
    """Its tile holds other pairs then, at other places."""
    base = tier("w2", 256, 128, [0, 1, 2, 3])
    x, weights, ids = batch(36, 256, 2, 4)
    together = check(layer, x, weights, ids, base)
    order = torch.tensor([3, 1, 0, 2])
    moved = Tier(base.pool[order], torch.argsort(order).int(), base.layout)
    some = torch.arange(35, 0, -2)
    alone = layer.expert_layer(x[some], weights[some], ids[some], moved, None, swiglu_limit=LIMIT)
    assert torch.equal(alone, together[some])


@pytest.mark.parametrize("bound", ["_AT_ONCE", "_PARTS_BYTES"])
def test_portions_have_the_bits_of_the_whole(monkeypatch, layer, bound):
    base = tier("w2", 128, 64, [0, -1, 1, 2])
    arguments = batch(39, 128, 2, 4)
    whole = check(layer, *arguments, base)
    monkeypatch.setattr(layers, bound, 16 if bound == "_AT_ONCE" else 16 * 2 * 128 * 4)
    layer.driver.launches.clear()
    assert torch.equal(check(layer, *arguments, base), whole)
    assert layer.driver.launches == ["mark", *STEP, *STEP, *STEP]


def test_a_streamed_layer_has_the_same_bits(monkeypatch, layer):
    base = tier("w2", 128, 64, [0, 1, 2, 3])
    x, weights, ids = batch(20, 128, 3, 4)
    whole = layer.expert_layer(x, weights, ids, base, None, swiglu_limit=LIMIT)
    monkeypatch.setattr(layers, "_AT_ONCE", 16)
    parts = torch.zeros(60, 128)
    for present in ([0, 2], [1, 3]):
        some = torch.full((4,), -1, dtype=torch.int32)
        some[present] = base.slot_of[present]
        layer.add_parts(parts, x, ids, base._replace(slot_of=some), None, swiglu_limit=LIMIT)
    combined = experts.combine_parts(parts, weights, torch.bfloat16, backend="reference")
    assert torch.equal(combined, whole)
    assert "mark" not in layer.driver.launches  # nobody asked


def test_shards_add_up_to_the_whole(layer):
    check_shards(layer, "fp4-mx", batch(17, 128, 1, 1))


def test_a_layer_of_real_width(layer):
    """GLM-5.2's hidden size, a quarter of its experts' columns."""
    base = tier("w2", 6144, 512, [0])
    check(layer, *batch(17, 6144, 1, 1), base)


@pytest.mark.skipif(not TINYMOE.exists(), reason="TinyMoE lies in another package")
def test_tinymoes_layer(layer):
    routed = 12  # of 64: encoding takes the time
    base, fine = tinymoe_tiers(routed)
    arguments = batch(24, 128, 6, routed)
    for fine_tier in (None, fine):
        # E4M3 activations cost a few percent
        check_tinymoe(layer, arguments, base, fine_tier, 0.08)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64])
def test_the_operation_dispatches(monkeypatch, layer, dtype):
    monkeypatch.setattr(arch, "capability", lambda _device: (12, 0))
    monkeypatch.setattr(trust, "layer_on", lambda _device: layer)
    base = tier("w2", 128, 64, [0, -1, 1])
    x, weights, ids = batch(18, 128, 2, 3)
    missing = torch.zeros(1, dtype=torch.int64)
    shape = {"hidden": 128, "intermediate": 64, "swiglu_limit": LIMIT}
    out = experts.experts(
        x, weights, ids.to(dtype), base.pool, base.slot_of, **shape, missing=missing
    )
    want = stated(x, weights, ids, base, None, bfloat16=False)
    assert np.abs(out.double().numpy() - want).max() <= 2.0**-8 * np.abs(want).max()
    assert missing.item() == 1
    assert layer.driver.launches == ["mark", *STEP]
    parts = torch.zeros(36, 128)
    experts.add_parts(parts, x, ids, base.pool, base.slot_of, **shape)
    combined = experts.combine_parts(parts, weights, torch.bfloat16, backend="reference")
    assert torch.equal(combined, out)
    assert (parts[(ids == 1).flatten()] == 0).all()


def test_ids_of_no_expert_are_absent(layer):
    base = tier("w2", 128, 64, [0, 1])
    x, weights, ids = batch(21, 128, 2, 2)
    ids[:17, 0], ids[1, 1] = 7, -3  # more than a tile of them
    missing = torch.zeros(1, dtype=torch.int64)
    out = layer.expert_layer(x, weights, ids, base, None, swiglu_limit=LIMIT, missing=missing)
    known = torch.where((ids < 0) | (ids > 1), 0, ids)
    weights[:17, 0] = weights[1, 1] = 0
    want = stated(x, weights, known, base, None, bfloat16=False)
    assert np.abs(out.double().numpy() - want).max() <= 2.0**-8 * np.abs(want).max()
    assert missing.item() == 1  # all of them count as one


def test_no_tokens(layer):
    base = tier("w2", 128, 64, [0])
    x, weights, ids = batch(0, 128, 1, 1)
    assert layer.expert_layer(x, weights, ids, base, None, swiglu_limit=LIMIT).shape == (0, 128)
    assert layer.driver.launches == []


def check_tiles(programs, ids, tables):
    """Let `sort` make tiles of two tiers, and compare."""
    (tokens, _), count = ids.shape, tables.shape[1]
    driver, layout = EmulatedDriver(), row_layout("w2", 64, 64)
    pool = driver.empty((count, layout.row_bytes), torch.uint8)
    tiers = [Tier(pool, torch.from_numpy(table), layout) for table in tables]
    places = tiles_of(ids.size, count)
    tiles = [driver.empty((places, PREFILL.group.itemsize), torch.uint8) for _ in tiers]
    present, values, scales = (
        driver.empty(shape, torch.uint8) for shape in ((ids.size,), (tokens, 64), (tokens, 2))
    )
    arguments = (torch.zeros(tokens, 64).bfloat16(), torch.from_numpy(ids), tiers, tiles, present)
    launch_sort(driver, programs("sort"), *arguments, Vectors(values, scales))
    found = [questions.held(tensor.numpy().view(PREFILL.group)[:, 0]) for tensor in tiles]
    assert (found[0] == questions.tiles_for(ids, tiers[0], tables[1])).all()
    assert (found[1] == questions.tiles_for(ids, tiers[1], None)).all()
    here = (tables >= 0).any(axis=0)
    want = [0 <= expert < count and here[expert] for expert in ids.flat]
    assert present.numpy().astype(bool).tolist() == want


def drawn(seed, tokens, top_k, count):
    """Ids, of no expert too, and the slots of two tiers."""
    chance = np.random.default_rng(seed)
    ids = chance.integers(-1, count + 1, (tokens, top_k)).astype(np.int32)
    slots = np.where(chance.random((2, count)) < 0.5, -1, np.arange(count))
    return ids, slots.astype(np.int32)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_tiles_are_as_described(data, programs):
    """Any routing, ids of no expert included: every pair of a present expert is in one tile."""
    sizes = (data.draw(st.integers(1, most)) for most in (40, 4, 9))
    check_tiles(programs, *drawn(data.draw(st.integers(0, 2**32 - 1)), *sizes))


def test_more_tokens_than_threads(programs):
    check_tiles(programs, *drawn(0, 700, 3, 5))


@pytest.mark.parametrize("counted", [True, False])
def test_more_pairs_and_experts_than_threads_are_marked(programs, counted):
    ids, slots = drawn(1, 1500, 3, 2100)
    driver, layout = EmulatedDriver(), row_layout("w2", 64, 64)
    pool = torch.zeros(1, layout.row_bytes, dtype=torch.uint8)
    tiers = [Tier(pool, torch.from_numpy(table), layout) for table in slots]
    missing = torch.tensor([3], dtype=torch.int32) if counted else None
    wanted = None if counted else torch.zeros(2100, dtype=torch.uint8)
    program, ids_there = programs("mark"), torch.from_numpy(ids)
    launch_mark(driver, program, ids_there, tiers, missing=missing, wanted=wanted)
    routed = np.unique(ids[(ids >= 0) & (ids < 2100)])
    absent = (slots[:, routed] < 0).all(axis=0).sum() + 1  # and those of no expert
    if missing is not None:
        assert missing.item() == 3 + absent
    if wanted is not None:
        assert wanted.nonzero()[:, 0].tolist() == routed.tolist()
