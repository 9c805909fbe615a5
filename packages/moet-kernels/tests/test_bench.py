import pytest
import torch

from moet_core.samples import FORMATS
from moet_kernels import bench


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(bench, "SHAPE", (16, 64))
    monkeypatch.setattr(bench, "GOLDEN_SHAPE", (16, 64))


def test_every_format_codec_and_implementation_is_measured(small):
    names = {m.name for m in bench.bench_encode(0.0)}
    assert names == {
        f"encode {source_format} to {codec}, {implementation}"
        for source_format in FORMATS
        for codec in ("w2", "fp4-mx")
        for implementation in ("torch", "numpy")
    }


def test_at_least_one_sample_is_taken(small):
    assert all(len(m.samples) == 1 and m.min > 0 for m in bench.bench_encode(0.0))


def test_longer_takes_more_samples(small):
    assert all(len(m.samples) > 1 for m in bench.bench_encode(0.02))


def test_the_number_of_threads_is_put_back(small):
    before = torch.get_num_threads()
    bench.bench_encode(0.0, threads=before + 1)
    assert torch.get_num_threads() == before


def test_rates_count_weights_and_scales(small):
    source = bench.typical_source("nvfp4", 16, 64)
    assert bench._input_bytes(source) == 16 * 32 + 16 * 4
