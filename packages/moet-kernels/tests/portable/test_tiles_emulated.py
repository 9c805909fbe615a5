"""The prefill kernels' machine code, run in our emulator: whole layers against float64."""

import pytest
import torch

from moet_kernels.portable.emulated import EmulatedTiles, emulating
from moet_kernels.portable.native_tiles import cubin_path
from moet_kernels.portable.tile_cuts import TILE_CUTS
from moet_kernels.sass.tools import have_tools

pytestmark = pytest.mark.skipif(not have_tools("nvdisasm"), reason="needs nvdisasm")
SLOTS = [2, 0, -1, 3]
IDS = torch.tensor([[1, 3]] * 14 + [[1, 0], [1, 2], [3, 1], [1, 0]])
"""18 pairs of expert 1, which are two groups of 16; expert 2 is absent from `SLOTS`."""


@pytest.fixture(scope="module")
def kernels():
    return EmulatedTiles(cubin_path().read_bytes())


def cuts_of(codec, vectors, warpgroups=2):
    """The kernels for gate-up and down."""
    found = {
        cut.down: cut
        for cut in TILE_CUTS
        if (cut.codec, cut.vectors, cut.warpgroups) == (codec, vectors, warpgroups)
    }
    return found[False], found[True]


def grouped(made, group):
    """Pairs by expert, as `grouping.sort` has them, and a group behind the last."""
    order, expert_of = [], []
    for expert in range(made.experts):
        tiers = [tier for tier in (made.base, made.fine) if tier is not None]
        if all(tier.slot_of[expert] < 0 for tier in tiers):
            continue
        pairs = torch.nonzero(made.ids.flatten() == expert).flatten().tolist()
        for start in range(0, len(pairs), group):
            own = pairs[start : start + group]
            order += own + [-1] * (group - len(own))
            expert_of.append(expert)
    order, expert_of = order + [-1] * group, [*expert_of, -1]
    return torch.tensor(order, dtype=torch.int32), torch.tensor(expert_of, dtype=torch.int32)


def run(kernels, made, cuts, limit=0.0):
    """Return parts float32 [pairs, H] of a case, NaN where nothing was written."""
    parts = torch.full((made.ids.numel(), made.hidden), torch.nan)
    groups = grouped(made, next(iter(cuts.values()))[0].vectors)
    with emulating():
        kernels.add_parts(
            parts, made.x, made.top_k, groups, cuts, made.base, made.fine, made.limit or limit
        )
    return parts


def weighted(made, parts):
    """Each token's sum of its parts, those of absent experts left out."""
    absent = parts.isnan().all(dim=1, keepdim=True)
    kept = torch.where(absent, 0, parts).reshape(made.tokens, made.top_k, -1)
    return (made.weights[:, :, None].double() * kept).sum(dim=1)


@pytest.mark.parametrize("codec", ["w2", "fp4-mx", "fp4-nv"])
@pytest.mark.parametrize("vectors", [16, 32])
def test_a_layer_agrees_with_float64(kernels, case, error, codec, vectors):
    sizes = {"hidden": 768, "intermediate": 128}
    made = case(
        tokens=18, codec=codec, experts=4, top_k=2, ids=IDS, slots=SLOTS, limit=0.5, **sizes
    )
    parts = run(kernels, made, {codec: cuts_of(codec, vectors)})
    assert error(weighted(made, parts), made.float64()) < 4e-3
    assert parts.isnan().all(dim=1).tolist() == (made.ids.flatten() == 2).tolist()
