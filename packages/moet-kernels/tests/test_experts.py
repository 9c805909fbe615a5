import numpy as np
import pytest
import torch

from moet_core.codecs import codec_names
from moet_core.row import decode_row, encode_expert, row_layout
from moet_core.samples import typical_source
from moet_kernels import experts as module
from moet_kernels.experts import add_parts, combine_parts, experts

HIDDEN, INTERMEDIATE, EXPERTS = 64, 96, 5


def make_rows(codec="w2"):
    shapes = [(INTERMEDIATE, HIDDEN)] * 2 + [(HIDDEN, INTERMEDIATE)]
    rows = [
        encode_expert(
            codec, *(typical_source("fp32", *s, seed=9 * e + i) for i, s in enumerate(shapes))
        )
        for e in range(EXPERTS)
    ]
    return np.stack(rows)


def make_batch(tokens=7, top_k=3, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype) * 8
    weights = torch.rand(tokens, top_k, generator=generator)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    return x, weights, scores.topk(top_k).indices


def run(batch, rows, slots=None, codec="w2", **options):
    pool = torch.from_numpy(rows)
    slot_of = torch.arange(EXPERTS, dtype=torch.int32)
    if slots is not None:
        slot_of = torch.tensor(slots, dtype=torch.int32)
    sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE}
    return experts(*batch, pool, slot_of, codec=codec, **sizes, **options)


def in_float64(batch, rows, codec="w2", limit=None, absent=(), activation=np.float64):
    """The whole operation in float64, from golden weights; `activation` rounds."""
    x, weights, ids = (t.double().numpy() if t.is_floating_point() else t.numpy() for t in batch)
    layout = row_layout(codec, HIDDEN, INTERMEDIATE)
    matrices = [decode_row(layout, row) for row in rows]
    out = np.zeros_like(x)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            if expert in absent:
                continue
            w13, w2 = matrices[expert]
            gate, up = np.split(w13 @ x[token], 2)
            if limit:
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            out[token] += weight * (w2 @ activation(gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.parametrize("codec", codec_names())
def test_float32_agrees_with_float64(codec):
    batch, rows = make_batch(), make_rows(codec)
    result = run(batch, rows, codec=codec)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(
        result.double(), in_float64(batch, rows, codec), rtol=1e-4, atol=1e-5
    )


def to_bfloat16(values):
    return torch.from_numpy(values).bfloat16().double().numpy()


def test_bfloat16_rounds_the_activation_and_the_result():
    batch, rows = make_batch(dtype=torch.bfloat16), make_rows()
    result = run(batch, rows)
    assert result.dtype == torch.bfloat16
    expected = to_bfloat16(in_float64(batch, rows, activation=to_bfloat16))
    # float32 sums may fall on the other side of a rounding boundary here and there
    assert (result.double().numpy() == expected).mean() > 0.98
    unrounded = to_bfloat16(in_float64(batch, rows))
    assert (unrounded == expected).mean() < 0.9


def test_swiglu_limit_clamps_gate_and_up():
    batch, rows = make_batch(), make_rows()
    clamped = in_float64(batch, rows, limit=0.5)
    assert np.abs(clamped - in_float64(batch, rows)).max() > 0.1
    result = run(batch, rows, swiglu_limit=0.5)
    np.testing.assert_allclose(result.double(), clamped, rtol=1e-4, atol=1e-5)


def test_an_absent_expert_contributes_exactly_zero_and_is_counted_once():
    batch, rows = make_batch(), make_rows()
    missing = torch.tensor([10], dtype=torch.int64)
    slots = [0, -1, 2, -1, 4]
    result = run(batch, rows, slots=slots, missing=missing)
    expected = in_float64(batch, rows, absent=(1, 3))
    np.testing.assert_allclose(result.double(), expected, rtol=1e-4, atol=1e-5)
    routed = set(batch[2].flatten().tolist())
    assert missing.item() == 10 + len(routed & {1, 3}) == 12


def test_absent_experts_nobody_routes_to_are_not_counted():
    x, weights, _ = make_batch()
    missing = torch.zeros(1, dtype=torch.int32)
    batch = x, weights, torch.tensor([[0, 2, 4]] * len(x))
    run(batch, make_rows(), slots=[0, -1, 2, -1, 4], missing=missing)
    assert missing.item() == 0


def test_all_absent_gives_zeros():
    missing = torch.zeros(1, dtype=torch.int32)
    result = run(make_batch(), make_rows(), slots=[-1] * EXPERTS, missing=missing)
    assert not result.any()
    assert missing.item() == EXPERTS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_do_not_change_a_bit(dtype):
    batch, rows = make_batch(dtype=dtype), make_rows()
    order = [3, 0, 4, 1, 2]
    moved = np.empty_like(rows)
    moved[order] = rows
    assert torch.equal(run(batch, moved, slots=order), run(batch, rows))


@pytest.mark.parametrize("at_a_time", [1, 2, 100])
def test_decoding_in_portions_does_not_change_a_bit(monkeypatch, at_a_time):
    batch, rows = make_batch(), make_rows()
    whole = run(batch, rows)
    monkeypatch.setattr(module, "_DECODED_BYTES", at_a_time * 3 * HIDDEN * INTERMEDIATE * 4)
    assert torch.equal(run(batch, rows), whole)


def test_a_token_may_be_routed_to_one_expert_twice():
    x, weights, _ = make_batch(top_k=2)
    batch, rows = (x, weights, torch.tensor([[3, 3]] * len(x))), make_rows()
    np.testing.assert_allclose(
        run(batch, rows).double(), in_float64(batch, rows), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_ids_of_any_integer_type_mean_the_same(dtype):
    x, weights, ids = make_batch()
    wanted = run((x, weights, ids), make_rows())
    assert torch.equal(run((x, weights, ids.to(dtype)), make_rows()), wanted)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_kernels_get_ids_of_whole_words(monkeypatch, dtype):
    got = []

    class Layer:
        @staticmethod
        def add_parts(_parts, _x, topk_ids, *_, **__):
            got.append(topk_ids)

        @staticmethod
        def expert_layer(x, _weights, topk_ids, *_, **__):
            got.append(topk_ids)
            return x.clone()

    monkeypatch.setattr(module, "choose_backend", lambda *_: "portable")
    monkeypatch.setattr(module, "_gpu_layer", lambda *_: Layer)
    x, weights, ids = make_batch()
    narrow, pool = ids.to(dtype), torch.from_numpy(make_rows())
    slot_of = torch.arange(EXPERTS, dtype=torch.int32)
    run((x, weights, narrow), make_rows())
    parts = torch.zeros(ids.numel(), HIDDEN)
    add_parts(parts, x, narrow, pool, slot_of, hidden=HIDDEN, intermediate=INTERMEDIATE)
    assert [each.dtype for each in got] == [torch.int32] * 2
    assert all(torch.equal(each, ids.int()) for each in got)


def test_no_tokens_give_no_rows():
    assert run(make_batch(tokens=0), make_rows()).shape == (0, HIDDEN)


def test_every_expert_routed_to_is_marked_as_wanted():
    wanted = torch.zeros(EXPERTS, dtype=torch.uint8)
    batch = make_batch()
    run(batch, make_rows(), slots=[0, -1, 2, -1, 4], wanted=wanted)
    assert set(wanted.nonzero().flatten().tolist()) == set(batch[2].flatten().tolist())


def test_marks_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"wanted must be uint8 \[5\], got torch.bool \[5\]"):
        run(make_batch(), make_rows(), wanted=torch.zeros(EXPERTS, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [[[0], [1, 2], [3, 4]], [[4, 0, 2], [], [1, 3]]])
def test_experts_in_groups_that_share_slots_do_not_change_a_bit(dtype, groups):
    x, weights, ids = make_batch(dtype=dtype)
    rows = torch.from_numpy(make_rows())
    parts = torch.zeros(ids.numel(), HIDDEN)
    sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE}
    for group in groups:
        slot_of = torch.full((EXPERTS,), -1, dtype=torch.int32)
        slot_of[group] = torch.arange(len(group), dtype=torch.int32)
        add_parts(parts, x, ids, rows[group], slot_of, **sizes)
    whole = run((x, weights, ids), rows.numpy())
    assert torch.equal(combine_parts(parts, weights, dtype), whole)


def test_the_registered_op_passes_torchs_own_checks():
    x, weights, ids = make_batch()
    args = (
        x,
        weights,
        ids,
        torch.from_numpy(make_rows()),
        torch.tensor([0, -1, 2, 3, 4], dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(EXPERTS, dtype=torch.uint8),
        HIDDEN,
        INTERMEDIATE,
        "w2",
        0.0,
    )
    results = torch.library.opcheck(torch.ops.moet.experts.default, args)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(7, HIDDEN, dtype=torch.float16)}, "x must be bfloat16 or float32"),
        ({"x": torch.zeros(7, HIDDEN + 1)}, rf"x must be \[tokens, {HIDDEN}\]"),
        ({"ids": torch.zeros(7, 2, dtype=torch.int64)}, r"must be \[7, k\]"),
        ({"ids": torch.full((7, 3), EXPERTS)}, r"topk_ids must be in 0\.\.4, got 5\.\.5"),
        ({"ids": torch.full((7, 3), -1)}, r"topk_ids must be in 0\.\.4, got -1\.\.-1"),
        ({"slots": [0, 1, 2, 3, EXPERTS]}, "slot_of names slot 5, the pool has 5"),
        ({"rows": np.zeros((EXPERTS, 4096), np.uint8)}, r"pool must be uint8 \[slots, 8192\]"),
        ({"swiglu_limit": -1.0}, "swiglu_limit must be positive or None"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    x, weights, ids = make_batch()
    batch = change.pop("x", x), weights, change.pop("ids", ids)
    rows = change.pop("rows", None)
    with pytest.raises(ValueError, match=message):
        run(batch, make_rows() if rows is None else rows, **change)
