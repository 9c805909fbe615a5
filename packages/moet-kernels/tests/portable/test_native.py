"""The CUDA kernels around the machine code: their files, who computes, and the fallback."""

import shutil
import warnings

import pytest
import torch

from moet_core.row import row_layout
from moet_kernels import arch
from moet_kernels.committed import digest
from moet_kernels.portable import few, native, tile_cuts
from moet_kernels.portable.build import (
    FOLDER,
    SOURCES,
    differences,
    read_manifest,
)
from moet_kernels.portable.cuts import CUTS, cut_of, include_text
from moet_kernels.portable.module import NativeError
from moet_kernels.portable.native_tiles import cubin_path
from moet_kernels.portable.tier import Tier
from moet_kernels.sass.tools import have_tools, tool_version

GPU = torch.device("cuda", 0)


def test_sources_and_compiled_files_are_the_manifests():
    manifest = read_manifest()
    assert set(manifest.sources) == set(SOURCES)
    ptx = {native.ptx_path(number).name for number in native.VERSIONS}
    assert set(manifest.compiled) == {*ptx, cubin_path().name}
    for name, sha256 in (manifest.sources | manifest.compiled).items():
        assert digest((FOLDER / name).read_bytes()) == sha256, name


def test_the_committed_cuts_are_those_of_the_launches():
    assert (FOLDER / "cuts.inc").read_text() == include_text()
    assert (FOLDER / "tiles.inc").read_text() == tile_cuts.include_text()


@pytest.mark.parametrize("number", native.VERSIONS)
def test_the_ptx_has_every_kernel_that_is_loaded(number):
    text = native.ptx_path(number).read_text()
    assert f".target sm_{number}\n" in text
    for name in [cut.name for cut in CUTS] + ["limbs", "combine"]:
        assert f".entry {name}(" in text, name


@pytest.mark.skipif(not have_tools("nvcc", "ptxas"), reason="the CUDA programs are missing")
def test_the_sources_give_the_committed_files():
    if tool_version("nvcc") != read_manifest().nvcc:
        pytest.skip("another nvcc made the committed files")
    assert differences() == []


@pytest.mark.skipif(not have_tools("nvcc", "ptxas"), reason="the CUDA programs are missing")
def test_a_changed_source_is_a_difference(tmp_path):
    if tool_version("nvcc") != read_manifest().nvcc:
        pytest.skip("another nvcc made the committed files")
    folder = shutil.copytree(FOLDER, tmp_path / "cuda")
    source = folder / "codecs.cuh"
    source.write_text(source.read_text() + "// another line\n")
    assert differences(folder) == ["manifest.json"]


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.name)
def test_every_row_is_computed_whatever_the_strip(cut):
    for rows in (128, 384, 2048, 6144, 7168):
        tiles = -(-rows // cut.tile_rows)
        for pairs in (1, 8, 64, 128):
            strip = cut.strip(rows, pairs, processors=132)
            assert 1 <= strip <= tiles, (rows, pairs)
    assert cut_of(cut.codec, down=cut.down) == cut


@pytest.mark.parametrize(
    ("hidden", "intermediate", "taken"), [(4096, 2048, True), (128, 384, True), (128, 64, False),
                                          (96, 128, False)],
)  # fmt: skip
def test_rows_of_whole_chunks_are_taken(hidden, intermediate, taken):
    assert native.takes(row_layout("w2", hidden, intermediate)) is taken


def test_more_experts_a_token_than_the_division_is_exact_for_are_tritons(monkeypatch):
    kernels = object()
    monkeypatch.setattr(few, "native_for", lambda _device: kernels)
    layout = row_layout("w2", 128, 128)
    for top_k in range(1, few.MOST_TOP_K + 1):
        assert few.native_kernels_of(GPU, top_k, layout) is kernels
        for pair in range(few.DECODE_TOKENS * top_k):
            assert pair * (65536 // top_k + 1) >> 16 == pair // top_k, (pair, top_k)
    assert few.native_kernels_of(GPU, few.MOST_TOP_K + 1, layout) is None


def test_a_refused_launch_names_kernel_and_device():
    kernels = object.__new__(native.Native)
    kernels.device = GPU
    with pytest.raises(NativeError, match=r"launch of down_w2 on cuda:0 .* says 719"):
        kernels.check((719,), "down_w2")


@pytest.fixture
def hopper(monkeypatch):
    """A GPU as far as it is asked what it is; nothing is loaded yet."""
    monkeypatch.setattr(arch, "capability", lambda _device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    native._loaded.cache_clear()
    yield
    native._loaded.cache_clear()


def test_kernels_that_do_not_load_are_told_once_and_triton_computes(hopper, monkeypatch):
    def refuse(_device, _image, *, overlap):
        assert overlap
        raise NativeError("the CUDA driver says CUDA_ERROR_UNSUPPORTED_PTX_VERSION")

    monkeypatch.setattr(native, "Native", refuse)
    with pytest.warns(UserWarning, match=r"cuda:0 \(the CUDA driver says CUDA_ERROR_UNSUPPORTED"):
        assert native.native_for(GPU) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.native_for(GPU) is None
        assert few.native_kernels_of(GPU, 8, row_layout("w2", 128, 128)) is None


def test_a_missing_file_is_a_reason_too(hopper, monkeypatch, tmp_path):
    monkeypatch.setattr(native, "ptx_path", lambda number: tmp_path / f"{number}.ptx")
    with pytest.warns(UserWarning, match=r"90\.ptx.*slower Triton kernels compute instead"):
        assert native.native_for(GPU) is None


@pytest.mark.parametrize(("capability", "number"), [((8, 0), 80), ((8, 9), 80), ((12, 0), 90)])
def test_the_best_ptx_that_a_gpu_runs_is_loaded_once(hopper, monkeypatch, capability, number):
    made = []

    def load(device, image, *, overlap):
        made.append((device, image, overlap))
        return made

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(native, "Native", load)
    assert native.native_for(GPU) is native.native_for(GPU) is made
    image = native.ptx_path(number).read_bytes() + b"\0"
    assert made == [(GPU, image, number >= 90)]


@pytest.mark.parametrize(("model", "fills"), [((2048, 6), False), ((2048, 8), True)])
def test_down_starts_early_where_gate_up_fills_the_processors(model, fills):
    kernels = object.__new__(native.Native)
    kernels.cuts, kernels.processors = CUTS, 132
    intermediate, pairs = model
    tier = Tier(torch.empty(0), torch.empty(0), row_layout("w2", 4096, intermediate))
    assert kernels._fills(tier, pairs) is fills
    assert kernels._fills(tier, 4 * pairs)
