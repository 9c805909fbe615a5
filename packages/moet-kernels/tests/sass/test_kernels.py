from pathlib import Path

import numpy as np
import pytest

import moet_kernels.sass.kernels as folder
from moet_kernels.sass.cases import copy_case, kernel_source, run_case, w2_case
from moet_kernels.sass.kernels.w2_gemm import SOURCES


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_written_sources_are_committed(name):
    path = Path(folder.__file__).parent / f"{name}.sass"
    assert path.read_text() == SOURCES[name]()


def test_copy():
    case = copy_case(5000, 2, 0)
    assert (run_case(kernel_source("copy"), case) == case.expected).all()


@pytest.mark.parametrize("k", [2048, 4096, 6144, 7168])
@pytest.mark.parametrize("m", [1, 5, 13])
def test_e4m3_equals_exact_sums(k, m):
    case = w2_case("w2_gemm_e4m3", m, 32, k, 10 * k + m, exact=True)
    got = run_case(kernel_source("w2_gemm_e4m3"), case).view(np.float32)
    assert (got == case.expected.reshape(-1)).all()


@pytest.mark.parametrize("kernel", sorted(SOURCES))
@pytest.mark.parametrize("k", [2048, 7168])
def test_random_data_within_1e_6(kernel, k):
    case = w2_case(kernel, 5, 32, k, k, exact=False)
    got = run_case(kernel_source(kernel), case).view(np.float32).astype(np.float64)
    want = case.expected.reshape(-1)
    assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()


def test_bf16_equals_exact_sums():
    case = w2_case("w2_gemm_bf16", 5, 32, 2048, 0, exact=True)
    got = run_case(kernel_source("w2_gemm_bf16"), case).view(np.float32)
    assert (got == case.expected.reshape(-1)).all()
