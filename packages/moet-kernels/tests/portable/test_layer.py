"""The portable kernels on the CPU, in Triton's interpreter; float64 is the reference.

Sizes are small, shapes are not tame: blocks of 32, 64 and 128 columns, numbers of column chunks
and of row blocks that no program size divides.
"""

import pytest
import torch

from moet_core.codecs import codec_names
from moet_kernels.experts import add_parts, combine_parts, experts
from moet_kernels.portable.interpret import call

FEW, MANY = 4, 17
"""Tokens for the decode kernels and for the prefill kernels."""

TOLERANCE = 4e-3
"""Two roundings to bfloat16, of activations and of results, and float32 sums."""


@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 96), (128, 160), (640, 32), (96, 256)])
@pytest.mark.parametrize("codec", codec_names())
def test_agrees_with_float64(case, portable, error, codec, hidden, intermediate, tokens):
    batch = case(tokens, codec, hidden, intermediate, experts=3, top_k=2)
    assert error(portable(batch).out, batch.float64()) < TOLERANCE


@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize("codec", codec_names())
def test_agrees_with_the_reference_backend_almost_to_the_bit(
    case, portable, reference, error, codec, tokens
):
    batch = case(tokens, codec)
    found, wanted = portable(batch), reference(batch)
    # both sum in float32, in different orders: a rounding may fall on the other side
    assert error(found.out, wanted.out.double()) < 1e-4
    assert (found.missing, found.wanted) == (wanted.missing, wanted.wanted)


@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_scales_at_both_ends_decode_exactly(case, portable, rows, tokens):
    for exponents in ((0, 1), (126, 128)):
        encoded = rows("w2", 64, 32, 6, exponents=exponents)
        batch = case(tokens, rows=encoded)
        # down is normal, gate and up are not: silu(gate) is gate / 2, so up must stand out
        if exponents[1] < 2:
            batch.x *= 2.0**66
            layout = batch.base.layout
            encoded[:, layout.scales2.slice] = 127
        wanted = batch.float64()
        found = portable(batch).out
        assert torch.isfinite(found).all()
        error = (found.double() - torch.as_tensor(wanted)).norm() / torch.as_tensor(wanted).norm()
        assert error < TOLERANCE, exponents


@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_what_is_no_number_does_not_become_one_where_it_is_clamped(case, portable, tokens):
    batch = case(tokens, limit=0.05)
    batch.x[1, 3] = torch.nan
    no_number = portable(batch).out.isnan()
    assert no_number.all(dim=1).nonzero()[:, 0].tolist() == [1]
    assert no_number.any(dim=1).nonzero()[:, 0].tolist() == [1]


@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_swiglu_limit_clamps_gate_and_up(case, portable, error, tokens):
    batch = case(tokens, limit=0.05)
    free = case(tokens).float64()
    assert error(torch.as_tensor(free), batch.float64()) > 0.1
    assert error(portable(batch).out, batch.float64()) < TOLERANCE


@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_an_absent_expert_contributes_exactly_zero_and_is_counted_once(
    case, portable, error, tokens
):
    batch = case(tokens, slots=[0, -1, 2, -1, 4, 5])
    batch.ids[0] = torch.tensor([1, 3, 1])
    found = portable(batch)
    routed = set(batch.ids.flatten().tolist())
    assert found.missing == len(routed & {1, 3})
    assert found.wanted == [int(expert in routed) for expert in range(6)]
    assert not found.out[0].any()
    assert error(found.out, batch.float64()) < TOLERANCE


@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_experts_nobody_routes_to_are_neither_counted_nor_wanted(case, portable, tokens):
    ids = torch.tensor([[0, 2, 4]] * tokens)
    found = portable(case(tokens, slots=[0, -1, 2, -1, 4, -1], ids=ids))
    assert found.missing == 0
    assert found.wanted == [1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_ids_of_no_expert_are_counted_and_contribute_zero(case, portable, tokens):
    ids = torch.tensor([[0, 1, 2]] * tokens)
    ids[1] = torch.tensor([-1, -1, -1])
    found = portable(case(tokens, ids=ids))
    assert found.missing == 1
    assert found.wanted == [1, 1, 1, 0, 0, 0]
    assert not found.out[1].any()


@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize("codecs", [("w2", "fp4-nv"), ("w2", "fp4-mx"), ("fp4-mx", "fp4-nv")])
def test_each_pair_takes_the_fine_tier_if_it_is_there(
    case, portable, reference, error, codecs, tokens
):
    slots, fine_slots = [3, -1, 0, -1, 1, 2], [-1, 1, 0, -1, -1, 2]
    batch = case(tokens, codecs[0], slots=slots, fine_codec=codecs[1], fine_slots=fine_slots)
    found, wanted = portable(batch), reference(batch)
    assert error(found.out, batch.float64()) < TOLERANCE
    assert (found.missing, found.wanted) == (wanted.missing, wanted.wanted)
    assert found.missing == 1


@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_neither_slots_nor_runs_change_a_bit(case, portable, tokens):
    first = portable(case(tokens)).out
    assert torch.equal(portable(case(tokens)).out, first)
    assert torch.equal(portable(case(tokens, slots=[3, 0, 5, 1, 4, 2])).out, first)


@pytest.mark.parametrize("codec", codec_names())
def test_a_tokens_result_does_not_depend_on_the_others_from_1_to_16(case, portable, codec):
    whole = case(16, codec, top_k=2)
    together = portable(whole).out
    for token in (0, 8, 15):
        assert torch.equal(portable(whole.only(token)).out[0], together[token]), token


@pytest.mark.parametrize("tokens", [16, MANY])
def test_all_tokens_may_take_one_expert_and_one_may_take_it_twice(case, portable, error, tokens):
    ids = torch.tensor([[3, 3, 1]] * tokens)
    batch = case(tokens, ids=ids)
    assert error(portable(batch).out, batch.float64()) < TOLERANCE


@pytest.mark.parametrize("tokens", [3, MANY])
def test_384_experts_most_of_them_empty(case, portable, error, tokens):
    batch = case(tokens, hidden=32, experts=384, top_k=24 // tokens + 1)
    found = portable(batch)
    assert error(found.out, batch.float64()) < TOLERANCE
    assert sum(found.wanted) == len(batch.ids.unique())


def test_ids_and_counters_may_have_either_width(case, portable):
    batch = case(FEW)
    wide = portable(batch)
    batch.ids = batch.ids.int()
    narrow = portable(batch)
    assert torch.equal(wide.out, narrow.out)
    assert wide.wanted == narrow.wanted


@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_counters_may_be_left_out(case, portable, process, tokens):
    batch = case(tokens, slots=[0, -1, 2, -1, 4, 5])
    args, options = batch.arguments()
    options |= {"missing": None, "wanted": None, "backend": "portable"}
    bare = process.submit(call, experts, args, options).result()[0]
    assert torch.equal(bare, portable(batch).out)


def test_no_tokens_give_no_rows(case, portable):
    assert portable(case(0)).out.shape == (0, 64)


@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_groups_of_experts_give_the_bits_of_all_at_once(case, portable, process, tokens):
    batch = case(tokens)
    whole = portable(batch).out
    parts = torch.zeros(tokens * batch.top_k, batch.hidden)
    for present in ([0, 1, 2], [3, 4, 5]):
        slots = [expert if expert in present else -1 for expert in range(6)]
        tier = case(tokens, slots=slots).base
        args = parts, batch.x, batch.ids, tier.pool, tier.slot_of
        options = {"hidden": 64, "intermediate": 32, "backend": "portable"}
        parts = process.submit(call, add_parts, args, options).result()[1][0]
    args = parts, batch.weights, torch.bfloat16
    assert torch.equal(combine_parts(*args, backend="reference"), whole)
    options = {"backend": "portable"}
    assert torch.equal(process.submit(call, combine_parts, args, options).result()[0], whole)
