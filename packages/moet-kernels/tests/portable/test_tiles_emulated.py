"""The prefill kernels' machine code, run in our emulator: whole layers against float64."""

import msgspec
import numpy as np
import pytest
import torch

from moet_core.codecs import codec_names
from moet_kernels.portable.emulated import EmulatedTiles, emulating
from moet_kernels.portable.native_tiles import cubin_path
from moet_kernels.portable.tile_cuts import TILE_CUTS
from moet_kernels.sass.errors import EmulationError, Fault
from moet_kernels.sass.operands import Instruction
from moet_kernels.sass.tools import have_tools

pytestmark = pytest.mark.skipif(not have_tools("nvdisasm"), reason="needs nvdisasm")
SLOTS = [2, 0, -1, 3]
IDS = torch.tensor([[1, 3]] * 14 + [[1, 0], [1, 2], [3, 1], [1, 0]])
"""18 pairs of expert 1, two groups of 16; expert 2 is absent from SLOTS."""

FEW = {"tokens": 18, "experts": 4, "top_k": 2, "ids": IDS, "slots": SLOTS}
SHORT = {"hidden": 256, "intermediate": 128}
LONG = {"hidden": 768, "intermediate": 128}
"""Gate and up have more chunks of 128 columns than a kernel has stages."""
DEEP = {"hidden": 256, "intermediate": 640}
"""So has down."""


@pytest.fixture(scope="module")
def kernels():
    return EmulatedTiles(cubin_path().read_bytes())


def cuts_of(codec, vectors, warpgroups=2):
    """The kernels for gate-up and down."""
    wanted = codec, vectors, warpgroups
    found = {
        cut.down: cut for cut in TILE_CUTS if (cut.codec, cut.vectors, cut.warpgroups) == wanted
    }
    return found[False], found[True]


def grouped(made, group):
    """Pairs by expert, as `grouping.sort` has them, and a group behind the last."""
    order, expert_of = [], []
    tiers = [tier for tier in (made.base, made.fine) if tier is not None]
    for expert in range(made.experts):
        if all(tier.slot_of[expert] < 0 for tier in tiers):
            continue
        pairs = torch.nonzero(made.ids.flatten() == expert).flatten().tolist()
        for start in range(0, len(pairs), group):
            own = pairs[start : start + group]
            order += own + [-1] * (group - len(own))
            expert_of.append(expert)
    order, expert_of = order + [-1] * group, [*expert_of, -1]
    return torch.tensor(order, dtype=torch.int32), torch.tensor(expert_of, dtype=torch.int32)


def run(kernels, made, cuts):
    """Return parts float32 [pairs, H] of a case, NaN where nothing was written."""
    parts = torch.full((made.ids.numel(), made.hidden), torch.nan)
    groups = grouped(made, next(iter(cuts.values()))[0].vectors)
    base, fine, limit = made.base, made.fine, made.limit or 0.0
    with emulating():
        kernels.add_parts(parts, made.x, made.top_k, groups, cuts, base, fine, limit)
    return parts


def weighted(made, parts):
    """Each token's sum of its parts, those of absent experts left out."""
    absent = parts.isnan().all(dim=1, keepdim=True)
    kept = torch.where(absent, 0, parts).reshape(made.tokens, made.top_k, -1)
    return (made.weights[:, :, None].double() * kept).sum(dim=1)


@pytest.mark.parametrize("codec", codec_names())
@pytest.mark.parametrize(
    ("vectors", "limit", "sizes"), [(16, 0.5, LONG), (32, None, LONG), (32, 0.5, DEEP)]
)
def test_a_layer_agrees_with_float64(kernels, case, error, codec, vectors, limit, sizes):
    made = case(codec=codec, limit=limit, **FEW, **sizes)
    parts = run(kernels, made, {codec: cuts_of(codec, vectors)})
    assert error(weighted(made, parts), made.float64()) < 4e-3
    assert parts.isnan().all(dim=1).tolist() == (made.ids.flatten() == 2).tolist()


@pytest.mark.parametrize(
    ("codec", "warpgroups", "sizes"),
    [
        ("w2", 2, LONG),
        ("w2", 4, {"hidden": 1024, "intermediate": 256}),
        ("fp4-mx", 4, LONG),
        ("fp4-nv", 4, LONG),
    ],
)
def test_groups_of_64_agree_with_float64(kernels, case, error, codec, warpgroups, sizes):
    ids = torch.tensor([[1]] * 65 + [[3], [2]])
    made = case(tokens=67, codec=codec, experts=4, top_k=1, ids=ids, slots=SLOTS, **sizes)
    parts = run(kernels, made, {codec: cuts_of(codec, 64, warpgroups)})
    assert error(weighted(made, parts), made.float64()) < 4e-3
    assert parts.isnan().all(dim=1).tolist() == (made.ids.flatten() == 2).tolist()


@pytest.mark.parametrize(("vectors", "warpgroups"), [(16, 2), (64, 4)])
def test_two_tiers_prefer_the_fine_one(kernels, case, error, vectors, warpgroups):
    fine = {"fine_codec": "fp4-nv", "fine_slots": [-1, 1, -1, 0]}
    made = case(tokens=18, experts=4, top_k=2, ids=IDS, slots=[2, 0, -1, -1], **fine, **SHORT)
    cuts = {"w2": cuts_of("w2", vectors), "fp4-nv": cuts_of("fp4-nv", vectors, warpgroups)}
    parts = run(kernels, made, cuts)
    assert error(weighted(made, parts), made.float64()) < 4e-3
    assert parts.isnan().all(dim=1).tolist() == (made.ids.flatten() == 2).tolist()


@pytest.mark.parametrize("codec", codec_names())
def test_a_pair_has_the_same_bits_in_every_kernel(kernels, case, codec):
    sizes = {"hidden": 512, "intermediate": 256 if codec == "w2" else 128}
    made = case(codec=codec, limit=0.5, **FEW, **sizes)
    shapes = sorted({(cut.vectors, cut.warpgroups) for cut in TILE_CUTS if cut.codec == codec})
    first, *others = [run(kernels, made, {codec: cuts_of(codec, *shape)}) for shape in shapes]
    for shape, parts in zip(shapes[1:], others, strict=True):
        assert torch.equal(parts.nan_to_num(), first.nan_to_num()), (shape, shapes[0])


@pytest.mark.parametrize("codec", codec_names())
def test_a_pair_has_the_same_bits_alone_and_in_other_slots(kernels, case, codec):
    cuts = {codec: cuts_of(codec, 16)}
    made = case(codec=codec, **FEW, **SHORT)
    together = run(kernels, made, cuts).nan_to_num()
    moved = case(codec=codec, **{**FEW, "slots": [0, 3, -1, 1]}, **SHORT)
    assert torch.equal(run(kernels, moved, cuts).nan_to_num(), together)
    for token in (0, 15, 17):
        alone = run(kernels, made.only(token), cuts).nan_to_num()
        assert torch.equal(alone, together[2 * token : 2 * token + 2]), token


def test_the_base_tier_s_kernels_leave_experts_of_the_fine_one_alone(kernels, case):
    fine = {"fine_codec": "fp4-nv", "fine_slots": [-1, 1, -1, 0]}
    made = case(**FEW, **fine, **SHORT)
    gate_up, down = cuts_of("w2", 16)
    groups, pairs = grouped(made, 16), made.ids.flatten()
    computed = (made.base.slot_of[pairs] >= 0) & (made.fine.slot_of[pairs] < 0)
    activated = torch.full((len(pairs), made.intermediate), torch.nan, dtype=torch.bfloat16)
    parts = torch.full((len(pairs), made.hidden), torch.nan)
    with emulating():
        vectors = kernels.ordered(made.x, "w2")
        for cut, x, out in ((gate_up, vectors, activated), (down, activated, parts)):
            top_k = 1 if cut.down else made.top_k
            kernels._tiles(cut, x, out, top_k, groups, made.base, made.fine, 0.0)
            assert out.isnan().all(dim=1).tolist() == (~computed).tolist(), cut.name
    assert computed.any()
    assert not parts[computed].isnan().any()


def test_absent_experts_are_left_alone(kernels, case):
    made = case(**{**FEW, "slots": [-1] * 4}, **SHORT)
    assert run(kernels, made, {"w2": cuts_of("w2", 16)}).isnan().all()


@pytest.mark.parametrize("codec", codec_names())
def test_a_vector_that_is_no_number_makes_its_own_parts_none(kernels, case, codec):
    made = case(codec=codec, limit=0.5, **{**FEW, "slots": [2, 0, 1, 3]}, **SHORT)
    made.x[3, 7] = torch.nan
    parts = run(kernels, made, {codec: cuts_of(codec, 32)})
    pairs = torch.arange(len(parts)) // made.top_k
    assert parts.isnan().all(dim=1).tolist() == (pairs == 3).tolist()
    assert parts.isnan().any(dim=1).tolist() == (pairs == 3).tolist()


@pytest.mark.parametrize("codec", codec_names())
def test_every_32_columns_are_ordered_alike(kernels, codec):
    columns = torch.arange(4224).expand(2, -1)  # more than a block's
    with emulating():
        low = kernels.ordered((columns % 256).bfloat16(), codec).int()
        high = kernels.ordered((columns // 256).bfloat16(), codec).int()
    found = 256 * high + low
    assert torch.equal(found, found[:1, :32].repeat(2, 132) + columns // 32 * 32)
    assert found[0, :32].sort().values.tolist() == list(range(32))
    assert found[0, :32].tolist() != list(range(32))


def without(program, unwanted):
    """The same program with NOPs for the instructions whose text has a word."""
    nop = Instruction("NOP", ())
    statements = [
        msgspec.structs.replace(each, instruction=nop) if unwanted in each.text else each
        for each in program.statements
    ]
    return msgspec.structs.replace(program, statements=tuple(statements))


@pytest.mark.parametrize(
    ("unwanted", "fault", "said"),
    [
        ("WARPGROUP.DEPBAR", Fault.IN_FLIGHT, "of an MMA that was not waited for"),
        ("WARPGROUP.ARRIVE", Fault.IN_FLIGHT, "written after the last WARPGROUP.ARRIVE"),
        ("FENCE.VIEW", Fault.RACE, "was not fenced by the thread"),
        ("BAR.SYNC", Fault.RACE, "with no barrier in between"),
        ("LDGDEPBAR", Fault.UNINITIALISED, "never written"),
    ],
)
def test_no_wait_can_be_left_out(kernels, monkeypatch, case, unwanted, fault, said):
    cuts = cuts_of("fp4-mx", 16)
    changed = {cut.name: without(kernels.program(cut.name), unwanted) for cut in cuts}
    monkeypatch.setattr(kernels, "_programs", {**kernels._programs, **changed})
    made = case(codec="fp4-mx", **FEW, **SHORT)
    with pytest.raises(EmulationError, match=said) as caught:
        run(kernels, made, {"fp4-mx": cuts})
    assert caught.value.fault == fault


def test_the_largest_scale_of_w2_gives_finite_weights(kernels, case, error):
    made = case(limit=1.0, **{**FEW, "slots": [2, 0, 1, 3]}, **SHORT)
    made.rows[:, made.base.layout.scales13.slice] = 252
    made.x *= 1e-30
    parts = run(kernels, made, {"w2": cuts_of("w2", 16)})
    assert not parts.isnan().any()
    with np.errstate(over="ignore"):  # of exp(-gate)
        wanted = made.float64()
    assert error(weighted(made, parts), wanted) < 4e-3
