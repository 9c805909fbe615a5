"""What a result says of the kernels that were measured."""

import torch

from moet_kernels import bench_experts
from moet_kernels.bench_experts import Plan, path_notes
from moet_kernels.portable import few

CPU = torch.device("cpu")
PLAN = Plan(["GLM-5.2", "Kimi-K2.7"], ["w2", "fp4-nv"], [1], 1)


def test_without_cuda_kernels_the_notes_name_triton():
    assert path_notes(PLAN, CPU) == (
        "up to 16 tokens: Triton kernels of decode steps for GLM-5.2 w2, GLM-5.2 fp4-nv, "
        "Kimi-K2.7 w2, Kimi-K2.7 fp4-nv",
        "more than 16 tokens: Triton kernels of prefill for GLM-5.2 w2, GLM-5.2 fp4-nv, "
        "Kimi-K2.7 w2, Kimi-K2.7 fp4-nv",
    )


def test_the_notes_name_cuda_for_the_layers_that_it_computes(monkeypatch):
    monkeypatch.setattr(few, "native_for", lambda _device: object())
    monkeypatch.setattr(few, "takes", lambda layout: layout.codec == "w2")
    assert path_notes(PLAN, CPU)[:2] == (
        "up to 16 tokens: CUDA kernels of decode steps for GLM-5.2 w2, Kimi-K2.7 w2",
        "up to 16 tokens: Triton kernels of decode steps for GLM-5.2 fp4-nv, Kimi-K2.7 fp4-nv",
    )


def test_the_notes_name_cuda_for_prefill_that_it_computes(monkeypatch):
    monkeypatch.setattr(bench_experts, "tiles_for", lambda _device: object())
    assert path_notes(PLAN, CPU)[1:] == (
        "more than 16 tokens: CUDA kernels of prefill for GLM-5.2 w2, GLM-5.2 fp4-nv, "
        "Kimi-K2.7 w2, Kimi-K2.7 fp4-nv",
    )
