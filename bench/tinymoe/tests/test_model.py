import numpy as np
import pytest
import torch
from tinymoe import experts
from tinymoe.corpus import is_held_out
from tinymoe.nvfp4 import fake_quantise, fake_w2, quantise
from tinymoe.shape import Shape
from tinymoe.train import main, prepare

from moet_core.floats import e8m0_to_float64
from moet_core.quantise import W2_LEVELS, w2_codes
from moet_core.sources import Nvfp4Source, to_float64

TINY = Shape(vocabulary=600, hidden=64, dense_intermediate=64, layers=2, experts=4, top_k=2)


@pytest.fixture
def weight():
    torch.manual_seed(0)
    found = torch.randn(64, 128) * 0.1
    found[3, :16] = 0
    return found


def source_of(weight):
    packed, scale, scale_2 = quantise(weight)
    return Nvfp4Source("w", packed.numpy(), scale.view(torch.uint8).numpy(), np.float32(scale_2))


def test_training_sees_the_values_that_are_exported(weight):
    assert np.array_equal(to_float64(source_of(weight)), fake_quantise(weight).double().numpy())


def test_the_values_are_exact_in_bf16(weight):
    values = fake_quantise(weight)
    assert torch.equal(values.bfloat16().float(), values)


def test_w2_of_training_is_w2_of_serving(weight):
    codes, scales = w2_codes(source_of(weight), zeros="sign")
    served = W2_LEVELS[codes] * e8m0_to_float64(scales).repeat(32, axis=1)
    assert np.array_equal(served, fake_w2(weight).double().numpy())


def test_the_gradient_passes_straight_through(weight):
    weight.requires_grad_()
    fake_quantise(weight).sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


def expert_inputs(device="cpu", dtype=torch.float32):
    torch.manual_seed(1)
    x = torch.randn(40, 32, dtype=dtype, device=device)
    ids = torch.rand(40, 6, device=device).topk(2)[1]  # experts 6 and 7 get nothing
    weights = torch.rand(40, 2, device=device)
    gate_up = torch.randn(8, 32, 32, dtype=dtype, device=device) / 6
    down = torch.randn(8, 32, 16, dtype=dtype, device=device) / 4
    return x, weights, ids, gate_up, down


def test_dense_experts_compute_the_weighted_sum():
    x, weights, ids, gate_up, down = expert_inputs()
    wanted = torch.zeros_like(x)
    for token in range(40):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            wanted[token] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    assert torch.allclose(experts.dense(x, weights, ids, gate_up, down), wanted, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_grouped_experts_compute_what_dense_ones_do():
    inputs = expert_inputs("cuda", torch.bfloat16)
    grouped, dense = (f(*inputs).float() for f in (experts.grouped, experts.dense))
    assert (grouped - dense).norm() < 0.01 * dense.norm()


def test_about_one_file_in_fifty_is_held_out():
    share = sum(is_held_out(f"file {index}") for index in range(3000)) / 3000
    assert 0.01 < share < 0.04


def test_a_smoke_run_is_reproducible_to_the_byte(tmp_path, monkeypatch):
    source = ["def f(x):\n    return x + 1\n" * 60, "class A:\n    pass\n" * 80]
    texts = {split: {"python": source, "docs": source} for split in ("train", "held_out")}
    monkeypatch.setattr("tinymoe.train.SMOKE", TINY)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode: None)  # stays global
    prepare(tmp_path, texts, TINY, 2)
    options = [
        "--smoke",
        "--steps",
        "3",
        "--tokens",
        "512",
        "--phases",
        "0.5:128,0.5:256",
        "--rows",
        "2",
        "--report",
        "2",
        "--quantise-from",
        "0.3",
        "--w2-every",
        "2",
    ]
    for name in ("a", "b"):
        main(["run", str(tmp_path), "--out", str(tmp_path / name), *options])
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert first == second
