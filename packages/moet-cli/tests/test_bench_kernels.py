"""`moet bench kernels`, as far as a machine without a GPU can run it."""

import pytest
import torch

from moet_cli import bench_kernels
from moet_cli.main import main
from moet_core.geometry import DEEPSEEK_V4_FLASH, GLM_5_2

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@without_gpu
def test_without_a_gpu_it_says_what_it_needs_and_fails(capsys, tmp_path):
    path = tmp_path / "r.json"
    assert main(["bench", "kernels", "--out", str(path)]) == 1
    error = capsys.readouterr().err
    assert "needs an NVIDIA GPU of sm_80 or newer" in error
    assert "Run it on a machine with one" in error
    assert not path.exists()


def test_an_old_gpu_is_refused_by_its_name(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Tesla T4")
    assert main(["bench", "kernels"]) == 1
    assert "needs an NVIDIA GPU of sm_80 or newer, got Tesla T4" in capsys.readouterr().err


def test_an_existing_file_is_refused_before_anything_else(capsys, tmp_path):
    path = tmp_path / "r.json"
    path.write_text("precious")
    assert main(["bench", "kernels", "--out", str(path)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "GLM-4"], "'GLM-4' is not one of"),
        (["--codec", "int8"], "'int8' is not one of"),
        (["--tokens", "0"], "0 is not in the range"),
    ],
)
def test_impossible_values_are_usage_errors(capsys, arguments, message):
    assert main(["bench", "kernels", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_vllm_without_gpu_kernels_is_told_and_left_out(monkeypatch):
    from moet_vllm import stock

    def check():
        raise ImportError("the vLLM that is installed has no GPU kernels")

    monkeypatch.setattr(stock, "check", check)
    rival, note = bench_kernels.stock_rival()
    assert rival is None
    assert note == (
        "vLLM's own FP4 layer was not measured: the vLLM that is installed has no GPU kernels"
    )


@pytest.mark.parametrize(
    ("model", "name", "mxfp4"),
    [(DEEPSEEK_V4_FLASH, "vLLM MXFP4 (Marlin)", True), (GLM_5_2, "vLLM NVFP4 (Marlin)", False)],
)
def test_the_rival_is_what_vllm_serves_the_model_s_checkpoint_with(monkeypatch, model, name, mxfp4):
    from moet_vllm import stock

    made = []
    monkeypatch.setattr(stock, "check", lambda: None)
    monkeypatch.setattr(stock, "marlin_layer", lambda *sizes: made.append(sizes))
    rival, note = bench_kernels.stock_rival()
    assert rival(model)[0] == name
    assert made == [(mxfp4, model.hidden, 2048, 256, model.swiglu_limit)]
    assert "fused_marlin_moe" in note


def test_its_models_and_codecs_are_all_there_are():
    from moet_core.codecs import codec_names
    from moet_kernels.bench_experts import MODELS

    assert tuple(MODELS) == bench_kernels.MODELS
    assert sorted(codec_names()) == sorted(bench_kernels.CODECS)
