"""The CUDA kernels of prefill around the machine code: which one computes, and who instead."""

import warnings

import pytest
import torch

from moet_core.codecs import codec_names
from moet_core.row import row_layout
from moet_kernels import arch
from moet_kernels.portable import many, native_tiles
from moet_kernels.portable.module import NativeError
from moet_kernels.portable.tier import Tier
from moet_kernels.portable.tile_cuts import TILE_CUTS, tile_cut

GPU = torch.device("cuda", 0)
MODELS = [(4096, 2048), (6144, 2048), (7168, 2048)]
SHARDS = [(4096, 1024), (6144, 512), (7168, 384)]


def test_the_machine_code_has_every_kernel():
    image = native_tiles.cubin_path().read_bytes()
    for name in [cut.name for cut in TILE_CUTS] + ["order"]:
        assert f".text.{name}\0".encode() in image, name


@pytest.mark.parametrize("cut", TILE_CUTS, ids=lambda cut: cut.name)
def test_a_block_fits_into_a_processor(cut):
    assert cut.resident * cut.shared_bytes <= arch.shared_memory_bytes(90)
    result = cut.vectors * (cut.tile_rows + 8) * 2  # lies where the stages were
    if cut.row_tiles == 1:
        result += cut.warpgroups * 32 * cut.vectors * 4
    assert cut.down or result <= cut.shared_bytes
    assert cut.vectors * 16 % cut.threads == 0, "every thread copies as many pieces of vectors"


@pytest.mark.parametrize(("hidden", "intermediate"), MODELS + SHARDS)
@pytest.mark.parametrize("codec", codec_names())
@pytest.mark.parametrize("pairs", [17 * 8, 256 * 16, 256 * 32, 256 * 65, 8192 * 8])
def test_models_and_their_shards_have_kernels(codec, hidden, intermediate, pairs):
    layout = row_layout(codec, hidden, intermediate)
    gate_up, down = (tile_cut(layout, pairs, 256, down=down) for down in (False, True))
    assert (gate_up.down, down.down) == (False, True)
    assert gate_up.codec == down.codec == codec
    assert gate_up.vectors == down.vectors
    assert intermediate % gate_up.tile_rows == 0
    assert hidden % down.tile_rows == 0


def test_more_pairs_an_expert_get_larger_groups():
    layout = row_layout("w2", 4096, 2048)
    found = [
        tile_cut(layout, 256 * pairs, 256, down=False) for pairs in (1, 12, 13, 28, 29, 48, 49)
    ]
    assert [cut.vectors for cut in found] == [16, 16, 32, 32, 64, 64, 64]
    assert [cut.warpgroups for cut in found] == [2, 2, 2, 2, 2, 2, 4]


@pytest.mark.parametrize(("hidden", "intermediate"), [(4096, 192), (384, 128), (64, 96)])
def test_rows_that_no_tile_divides_have_none(hidden, intermediate):
    layout = row_layout("w2", hidden, intermediate)
    assert tile_cut(layout, 4096, 256, down=False) is None
    assert native_tiles.cuts_for(4096, 256, row_layout("w2", 4096, 2048), layout) is None


def test_both_tiers_have_groups_of_the_same_size():
    base, fine = (row_layout(codec, 4096, 1024) for codec in ("w2", "fp4-nv"))
    for pairs in (100, 256 * 20, 256 * 40, 256 * 200):
        cuts = native_tiles.cuts_for(pairs, 256, base, fine)
        assert set(cuts) == {"w2", "fp4-nv"}
        assert len({cut.vectors for both in cuts.values() for cut in both}) == 1, pairs


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_architectures_have_tritons(monkeypatch, capability):
    monkeypatch.setattr(arch, "capability", lambda _device: capability)
    assert native_tiles.tiles_for(GPU) is None


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(arch, "capability", lambda _device: (9, 0))
    native_tiles._loaded.cache_clear()
    yield
    native_tiles._loaded.cache_clear()


def test_kernels_that_do_not_load_are_told_once(hopper, monkeypatch):
    def refuse(_device, _image):
        raise NativeError("the CUDA driver says CUDA_ERROR_NO_BINARY_FOR_GPU")

    monkeypatch.setattr(native_tiles, "Tiles", refuse)
    with pytest.warns(UserWarning, match=r"prefill do not load on cuda:0 \(the CUDA driver says"):
        assert native_tiles.tiles_for(GPU) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native_tiles.tiles_for(GPU) is None


class Recorded:
    """Stands for the kernels: what they were asked for."""

    def add_parts(self, *arguments):
        self.arguments = arguments


def test_many_tokens_are_computed_by_these_kernels(monkeypatch):
    kernels = Recorded()
    monkeypatch.setattr(many, "tiles_for", lambda _device: kernels)
    asked = []
    monkeypatch.setattr(many, "_sorted", lambda *of: asked.append(of) or ("order", "expert_of"))
    layout = row_layout("w2", 256, 128)
    tier = Tier(torch.zeros(4, layout.row_bytes, dtype=torch.uint8), torch.arange(4).int(), layout)
    x, ids = torch.zeros(40, 256, dtype=torch.bfloat16), torch.zeros(40, 2, dtype=torch.int32)
    parts = torch.zeros(80, 256)
    many.many_parts(parts, x, ids, tier, None, 7.0)
    cuts = native_tiles.cuts_for(80, 4, layout, None)
    assert asked[0][-1] == cuts["w2"][0].vectors == 32
    assert kernels.arguments == (parts, x, 2, ("order", "expert_of"), cuts, tier, None, 7.0)
