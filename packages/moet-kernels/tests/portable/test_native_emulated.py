"""The CUDA kernels' machine code, run in our emulator: whole decode steps against float64."""

import numpy as np
import pytest
import torch

from moet_core.codecs import codec_names
from moet_kernels.portable.cuts import limbed_bytes
from moet_kernels.portable.emulated import EmulatedNative, emulating
from moet_kernels.portable.native import ptx_path
from moet_kernels.sass.tools import compile_ptx, have_tools

pytestmark = pytest.mark.skipif(
    not have_tools("ptxas", "nvdisasm"), reason="needs ptxas and nvdisasm"
)
SIZES = {"hidden": 256, "intermediate": 128}
SLOTS = [2, 0, -1, 3, 5, 1]


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """The committed PTX as machine code for sm_90."""
    path = tmp_path_factory.mktemp("cubin") / "stream.cubin"
    compile_ptx(ptx_path(90), path, "sm_90")
    return path.read_bytes()


def run(image, case, **options):
    """Return the layer's result, the kernels launched, missing and wanted of a case."""
    native = EmulatedNative(image, **options)
    missing = torch.zeros(1, dtype=torch.int32)
    wanted = torch.zeros(case.experts, dtype=torch.uint8)
    ids = case.ids.contiguous()
    parts = torch.full((ids.numel(), case.hidden), torch.nan)
    out = torch.empty(case.tokens, case.hidden, dtype=torch.bfloat16)
    base, fine = case.base, case.fine
    with emulating():
        native.add_parts(parts, case.x, ids, base, fine, case.limit or 0.0, missing, wanted)
        native.combine(out, parts, case.weights, ids, base, fine, after=True)
    return out, native.launches, missing.item(), wanted.tolist()


def absent(case):
    """The distinct experts routed to that no tier has."""
    tiers = [tier for tier in (case.base, case.fine) if tier is not None]
    return {e for e in case.ids.unique().tolist() if all(t.slot_of[e] < 0 for t in tiers)}


@pytest.mark.parametrize("codec", codec_names())
def test_a_step_agrees_with_float64(image, case, error, codec):
    made = case(tokens=5, codec=codec, slots=SLOTS, limit=0.5, **SIZES)
    out, launches, missing, wanted = run(image, made)
    assert error(out, made.float64()) < 4e-3
    kernels = [name.split("_")[0] for name in launches if name != "limbs"]
    assert kernels == ["gate", "down", "combine"]
    assert launches.count("limbs") == (codec == "w2")
    assert missing == len(absent(made)) == 1
    assert wanted == [int(e in made.ids) for e in range(made.experts)]


def test_a_turn_may_have_a_chunk_less_and_a_tile_rows_that_do_not_exist(image, case, error):
    made = case(tokens=2, hidden=640, intermediate=384, slots=SLOTS)
    assert error(run(image, made)[0], made.float64()) < 4e-3


def test_two_tiers_prefer_the_fine_one(image, case, error):
    fine = {"fine_codec": "fp4-nv", "fine_slots": [-1, 1, 2, 0, -1, -1]}
    made = case(tokens=4, slots=[2, 0, -1, 3, -1, 1], **fine, **SIZES)
    out, launches, missing, _ = run(image, made)
    assert error(out, made.float64()) < 4e-3
    assert missing == len(absent(made)) == 1
    assert len(launches) == 6


def test_absent_experts_give_exactly_zero(image, case):
    made = case(tokens=3, slots=[-1] * 6, **SIZES)
    out, _, missing, _ = run(image, made)
    assert not out.any()
    assert missing == len(made.ids.unique())


def test_a_token_has_the_same_bits_alone_in_other_slots_and_on_other_processors(image, case):
    ids = torch.tensor([[1, 3]] * 9 + [[1, 4], [0, 1], [5, 3]])
    whole = case(tokens=12, top_k=2, ids=ids, slots=SLOTS, **SIZES)
    together = run(image, whole)[0]
    moved = case(tokens=12, top_k=2, ids=ids, slots=[0, 4, -1, 5, 2, 3], **SIZES)
    assert torch.equal(run(image, moved)[0], together)
    assert torch.equal(run(image, whole, processors=132)[0], together)
    for token in (0, 11):
        assert torch.equal(run(image, whole.only(token))[0][0], together[token]), token


def test_the_base_tier_s_kernel_leaves_experts_of_the_fine_one_alone(image, case):
    fine = {"fine_codec": "fp4-nv", "fine_slots": [-1, 1, 2, 0, -1, -1]}
    made = case(tokens=4, slots=[2, 0, -1, 3, -1, 1], **fine, **SIZES)
    parts = torch.full((made.ids.numel(), made.hidden), torch.nan)
    size = made.ids.numel(), limbed_bytes(made.intermediate)
    activated = torch.zeros(size, dtype=torch.uint8)
    with emulating():
        ids = made.ids.contiguous()
        EmulatedNative(image)._stream(activated, parts, ids, made.base, made.fine, down=True)
    pairs = made.ids.flatten()
    computed = (made.base.slot_of[pairs] >= 0) & (made.fine.slot_of[pairs] < 0)
    assert computed.any()
    assert parts.isnan().all(dim=1).tolist() == (~computed).tolist()
    assert not parts[computed].any()


@pytest.mark.parametrize("largest", [1e38, 2e38, 3e38])
def test_the_largest_activations_are_not_lost(image, case, error, rows, largest):
    ids = torch.tensor([[1]])
    small = rows("w2", 128, 128, 6, exponents=(60, 62))
    made = case(tokens=1, hidden=128, intermediate=128, top_k=1, ids=ids, rows=small, limit=1.0)
    peak = torch.arange(128) % 32 == 0
    made.x = (made.x.sign() * torch.where(peak, largest, largest / 8)).bfloat16()
    with np.errstate(over="ignore"):  # of exp(-gate)
        wanted = made.float64()
    assert error(run(image, made)[0], wanted) < 4e-3
