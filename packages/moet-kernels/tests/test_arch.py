import pytest
import torch

from moet_core.errors import ConfigError
from moet_kernels import arch
from moet_kernels.experts import experts


def on(monkeypatch, capability, dtype=torch.bfloat16):
    """Activations as if they were on a device of some capability, None for a CPU."""
    monkeypatch.setattr(arch, "capability", lambda _device: capability)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return torch.zeros(1, 64, dtype=dtype)


@pytest.mark.parametrize(
    ("capability", "dtype", "wanted"),
    [
        (None, torch.bfloat16, "reference"),
        ((7, 5), torch.bfloat16, "reference"),
        ((8, 0), torch.bfloat16, "portable"),
        ((9, 0), torch.bfloat16, "portable"),
        ((12, 0), torch.bfloat16, "sm120"),
        ((12, 1), torch.bfloat16, "portable"),
        ((12, 0), torch.float32, "reference"),
        ((9, 0), torch.float32, "reference"),
    ],
)
def test_the_default_is_the_last_backend_that_runs(monkeypatch, capability, dtype, wanted):
    assert arch.choose_backend(on(monkeypatch, capability, dtype), None) == wanted


def test_an_explicit_backend_wins_over_the_default(monkeypatch):
    assert arch.choose_backend(on(monkeypatch, (9, 0)), "reference") == "reference"


@pytest.mark.parametrize(
    ("capability", "dtype", "message"),
    [
        (None, torch.bfloat16, r"needs an NVIDIA GPU of sm_80 or newer, got device cpu\. Usable"),
        ((7, 5), torch.bfloat16, r"got sm_75\. Usable here: reference\."),
        ((9, 0), torch.float32, r"needs bfloat16 activations, got torch\.float32"),
    ],
)
def test_a_backend_that_cannot_run_is_an_error(monkeypatch, capability, dtype, message):
    with pytest.raises(ConfigError, match=message):
        arch.choose_backend(on(monkeypatch, capability, dtype), "portable")


@pytest.mark.parametrize("capability", [None, (9, 0), (10, 0), (12, 1)])
def test_sm120_is_refused_elsewhere(monkeypatch, capability):
    with pytest.raises(ConfigError, match=r"The backend sm120 needs an NVIDIA GPU of sm_120, got"):
        arch.choose_backend(on(monkeypatch, capability), "sm120")


def test_an_unknown_backend_is_an_error_that_names_the_known_ones(monkeypatch):
    with pytest.raises(
        ConfigError, match=r"one of reference, portable, sm120-e4m3, sm120, got 'cuda'"
    ):
        arch.choose_backend(on(monkeypatch, (9, 0)), "cuda")


def test_the_operation_asks_for_the_backend_it_is_given():
    pool = torch.zeros(1, 4096, dtype=torch.uint8)
    ids, slot_of = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    args = torch.zeros(1, 64), torch.ones(1, 1), ids, pool, slot_of
    with pytest.raises(
        ConfigError, match="one of reference, portable, sm120-e4m3, sm120, got 'cuda'"
    ):
        experts(*args, hidden=64, intermediate=32, backend="cuda")


def test_unknown_architectures_get_the_least_shared_memory():
    assert arch.shared_memory_bytes(90) == 227 * 1024
    assert arch.shared_memory_bytes(999) == 99 * 1024
