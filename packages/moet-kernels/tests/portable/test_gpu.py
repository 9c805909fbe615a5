"""The portable kernels on a GPU, at the sizes of real models.

Most of the time goes into compiling prefill kernels, a set for every size, codec and tile shape:
no test compiles what another has compiled already. pytest-xdist spreads them over the host's cores.
"""

import pytest
import torch

from moet_core.codecs import codec_names
from moet_core.row import row_layout
from moet_kernels.decode import decode_rows, tensor_scales
from moet_kernels.experts import Tier, experts
from moet_kernels.portable.many import native_parts
from moet_kernels.portable.native_tiles import tiles_for
from moet_kernels.portable.tile_cuts import TILE_CUTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # PyTorch warns that it does not see all of them.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

MODELS = {
    "DeepSeek-V4-Flash": (4096, 2048, 256, 6),
    "GLM-5.2": (6144, 2048, 256, 8),
    "Kimi-K2.7": (7168, 2048, 384, 8),
}
SHARDS = [(4096, 1024, 6), (6144, 512, 8), (7168, 384, 8)]
TOLERANCE = 4e-3


class Layer:
    """Random experts, some of them absent, and batches for them."""

    def __init__(self, rows, codec, hidden, intermediate, experts, top_k, slots=None):
        self.hidden, self.experts, self.top_k = hidden, experts, top_k
        slots = torch.arange(experts) if slots is None else slots
        made = rows(codec, hidden, intermediate, experts, device="cuda")
        pool = torch.empty_like(made)
        pool[slots.cuda()] = made
        self.tier = Tier(pool, slots.int().cuda(), row_layout(codec, hidden, intermediate))

    def batch(self, tokens, seed=0):
        generator = torch.Generator("cuda").manual_seed(seed)
        options = {"generator": generator, "device": "cuda"}
        x = torch.randn(tokens, self.hidden, **options).bfloat16()
        weights = torch.rand(tokens, self.top_k, **options)
        ids = torch.rand(tokens, self.experts, **options).topk(self.top_k).indices.int()
        return x, weights, ids

    def run(self, batch, tier=None, **options):
        tier = tier or self.tier
        layout = tier.layout
        sizes = {"hidden": layout.hidden, "intermediate": layout.intermediate}
        options = {"codec": layout.codec, "backend": "portable", **sizes, **options}
        return experts(*batch, tier.pool, tier.slot_of, **options)

    def float64(self, batch):
        """The whole operation in float64, nothing rounded; `decode_rows` is exact."""
        x, weights, ids = batch
        out = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
        for expert in ids.unique().tolist():
            slot = int(self.tier.slot_of[expert])
            row = self.tier.pool[slot : slot + 1]
            w13, w2 = (m[0].double() for m in decode_rows(row, self.tier.layout, torch.float32))
            scales = tensor_scales(row, self.tier.layout)
            gate_scale, up_scale, down_scale = [1.0] * 3 if scales is None else scales[0].tolist()
            token, k = (ids == expert).nonzero(as_tuple=True)
            gate, up = (x[token].double() @ w13.T).chunk(2, dim=1)
            activated = torch.nn.functional.silu(gate * gate_scale) * (up * up_scale)
            down = activated @ w2.T * down_scale
            out.index_add_(0, token, down * weights[token, k, None])
        return out


def check_against_float64(layer, batch, error):
    poison = torch.full((len(batch[0]) * layer.top_k, layer.hidden), torch.nan, device="cuda")
    del poison  # the allocator hands this memory out next: what is not written is NaN
    found, wanted = layer.run(batch), layer.float64(batch)
    differs = error(found, wanted)
    unwritten = found.isnan().sum(dim=1).nonzero()[:, 0].tolist()
    assert differs < TOLERANCE, (
        f"{len(found)} tokens: relative error wanted below {TOLERANCE}, found {differs}; tokens "
        f"with NaN: {unwritten[:9]} of {len(unwritten)}; in the reference: {wanted.isnan().sum()}"
    )


@pytest.mark.parametrize("codec", codec_names())
@pytest.mark.parametrize("model", MODELS)
def test_models_agree_with_float64(rows, error, model, codec):
    hidden, intermediate, count, top_k = MODELS[model]
    layer = Layer(rows, codec, hidden, intermediate, count, top_k)
    # 1 to 15 tokens have the same bits as the first of 16, which a test below shows
    for tokens in (16, 8192):
        check_against_float64(layer, layer.batch(tokens, seed=tokens), error)


@pytest.mark.parametrize(("hidden", "intermediate", "top_k"), SHARDS)
@pytest.mark.parametrize("codec", codec_names())
def test_tensor_parallel_shards_agree_with_float64(rows, error, codec, hidden, intermediate, top_k):
    layer = Layer(rows, codec, hidden, intermediate, 64, top_k)
    # the last number is for the tiles of many pairs, of rows that whole tiles do not divide
    for tokens in (1, 8, 16, 17, 100, *([2048] if intermediate == 384 else [])):
        check_against_float64(layer, layer.batch(tokens, seed=tokens), error)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "codec"),
    [(64, 96, "w2"), (96, 288, "w2"), *((128, 64, c) for c in codec_names()), (640, 32, "fp4-nv")],
)
def test_small_models_agree_with_float64(rows, error, codec, hidden, intermediate):
    layer = Layer(rows, codec, hidden, intermediate, 16, 4)
    for tokens in (1, 5, 16, 17, 200):
        check_against_float64(layer, layer.batch(tokens, seed=tokens), error)


@pytest.mark.parametrize("tokens", [1, 16, 8192])
def test_100_runs_alone_and_in_a_graph_give_the_same_bits(rows, tokens):
    layer = Layer(rows, "w2", 6144, 2048, 256, 8)
    batch = layer.batch(tokens)
    first = layer.run(batch)
    for run in range(100):
        assert torch.equal(layer.run(batch), first), f"run {run}"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer.run(batch)
    for replay in range(100):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, first), f"replay {replay}"


@pytest.mark.parametrize("tokens", [1, 16, 8192])
def test_slots_do_not_change_a_bit(rows, tokens):
    shuffled = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    ordered, moved = (Layer(rows, "w2", 4096, 2048, 256, 6, slots) for slots in (None, shuffled))
    batch = ordered.batch(tokens)
    assert torch.equal(ordered.run(batch), moved.run(batch))


@pytest.mark.parametrize("codec", codec_names())
@pytest.mark.parametrize("model", MODELS)
def test_a_token_does_not_depend_on_the_others_from_1_to_16(rows, model, codec):
    layer = Layer(rows, codec, *MODELS[model])
    x, weights, ids = layer.batch(16)
    ids[:12, 0] = ids[0, 0]  # one expert has more tokens than a matrix instruction takes
    whole = layer.run((x, weights, ids))
    for tokens in range(1, 17):
        part = layer.run((x[:tokens], weights[:tokens], ids[:tokens]))
        assert torch.equal(part, whole[:tokens]), f"the first {tokens} tokens"
        last = slice(16 - tokens, 16)
        part = layer.run((x[last], weights[last], ids[last]))
        assert torch.equal(part, whole[last]), f"the last {tokens} tokens"


@pytest.mark.parametrize("codec", codec_names())
def test_every_kernel_of_prefill_gives_a_pair_the_same_bits(rows, codec):
    native = tiles_for(torch.device("cuda", 0))
    if native is None:
        pytest.skip("these kernels are for sm_90")
    layer = Layer(rows, codec, 1024, 512, 16, 4)
    x, _, ids = layer.batch(70)
    parts, of_codec = [], [cut for cut in TILE_CUTS if cut.codec == codec]
    for gate_up, down in zip(of_codec[::2], of_codec[1::2], strict=True):
        found = torch.full((ids.numel(), 1024), torch.nan, device="cuda")
        native_parts(native, {codec: (gate_up, down)}, found, x, ids, layer.tier, None, 7.0)
        parts.append(found)
    assert not parts[0].isnan().any()
    for cut, found in zip(of_codec[::2], parts, strict=True):
        assert torch.equal(found, parts[0]), cut.name


@pytest.mark.parametrize("tokens", [4, 100])
@pytest.mark.parametrize("codec", codec_names())
def test_what_is_no_number_does_not_become_one(rows, codec, tokens):
    layer = Layer(rows, codec, 512, 256, 16, 4)
    x, weights, ids = layer.batch(tokens)
    x[1, 7] = torch.nan
    out = layer.run((x, weights, ids), swiglu_limit=7.0)
    assert out.isnan().all(dim=1).nonzero()[:, 0].tolist() == [1]
    assert out.isnan().any(dim=1).nonzero()[:, 0].tolist() == [1]


@pytest.mark.parametrize("tokens", [4, 100])
def test_replays_follow_slots_tiers_and_flags_on_the_device(rows, error, tokens):
    base, fine = (Layer(rows, codec, 4096, 1024, 32, 6) for codec in ("w2", "fp4-nv"))
    batch = base.batch(tokens)
    missing = torch.zeros(1, dtype=torch.int32, device="cuda")
    wanted = torch.zeros(32, dtype=torch.uint8, device="cuda")
    options = {"fine": fine.tier, "missing": missing, "wanted": wanted}
    base.run(batch, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = base.run(batch, **options)
    everyone = torch.arange(32, dtype=torch.int32, device="cuda")
    routed = batch[2].unique()
    for of_base, of_fine in ((True, False), (False, True), (False, False)):
        base.tier.slot_of.copy_(everyone if of_base else -1)
        fine.tier.slot_of.copy_(everyone if of_fine else -1)
        missing.zero_()
        wanted.zero_()
        graph.replay()
        assert wanted.nonzero()[:, 0].tolist() == routed.tolist()
        if of_base or of_fine:
            assert missing.item() == 0
            assert error(out, (base if of_base else fine).float64(batch)) < TOLERANCE
        else:
            assert missing.item() == len(routed)
            assert not out.any()


@pytest.mark.parametrize("tokens", [4, 100])
def test_nothing_waits_for_the_device(rows, tokens):
    layer = Layer(rows, "w2", 4096, 512, 32, 6)
    batch = layer.batch(tokens)
    counters = {
        "missing": torch.zeros(1, dtype=torch.int32, device="cuda"),
        "wanted": torch.zeros(32, dtype=torch.uint8, device="cuda"),
    }
    layer.run(batch, **counters)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.run(batch, **counters)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("tokens", [5, 70])
def test_the_default_backend_is_the_portable_one(rows, tokens):
    layer = Layer(rows, "w2", 4096, 512, 32, 6)
    batch = layer.batch(tokens)
    assert torch.equal(layer.run(batch, backend=None), layer.run(batch))
