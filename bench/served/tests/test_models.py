"""The checkpoints are what vLLM's models load, and route as they say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from served.models import SKEW, hot_experts, skewed_bias, write_model
from served.settings import GIB, read_experts
from served.shapes import SHAPES

CPU = torch.device("cpu")
JOB = Path(__file__).with_name("names_job.py")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    for name in ("glm-tiny", "kimi-tiny"):
        write_model(folder / name, SHAPES[name], CPU)
    return folder


def test_vllm_s_models_find_every_tensor_and_need_no_other(root):
    names = ("glm-tiny", "kimi-tiny-skewed")
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, str(JOB), *(str(root / name) for name in names)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **quiet},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        name: {"empty": [], "unknown": []} for name in names
    }


def test_the_index_names_what_the_shards_hold(root):
    folder = root / "glm-tiny"
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for shard in sorted(set(index.values())):
        with safe_open(folder / shard, "pt") as file:
            found.update(dict.fromkeys(file.keys(), shard))
    assert found == index


def test_experts_have_scales_and_sizes_of_their_matrices(root):
    shape = SHAPES["kimi-tiny"]
    with safe_open(root / "kimi-tiny" / "experts-01.safetensors", "pt") as file:
        prefix = "model.layers.1.mlp.experts.5.down_proj"
        weight = file.get_tensor(f"{prefix}.weight")
        scale = file.get_tensor(f"{prefix}.weight_scale").float()
        scale_2 = float(file.get_tensor(f"{prefix}.weight_scale_2"))
        assert float(file.get_tensor(f"{prefix}.input_scale")) == 1.0
    assert weight.shape == (shape.hidden, shape.intermediate // 2)
    assert scale.shape == (shape.hidden, shape.intermediate // 16)
    assert (scale.min(), scale.max()) == (0.75, 1.375)
    assert len(weight.unique()) == 256
    spread = 2.93 * scale_2 * shape.intermediate**0.5
    assert 0.7 < spread < 1.42, f"a matrix should keep the size of its input, got {spread}"


def test_both_routings_share_every_shard_but_the_bias(root):
    plain, skewed = root / "kimi-tiny", root / "kimi-tiny-skewed"
    same = {
        path.name
        for path in plain.glob("*.safetensors")
        if path.stat().st_ino == (skewed / path.name).stat().st_ino
    }
    assert same == {"dense.safetensors", "experts-01.safetensors", "experts-02.safetensors"}


def test_a_folder_that_holds_the_model_is_left_alone(root):
    path = root / "kimi-tiny" / "dense.safetensors"
    before = path.stat().st_mtime_ns
    write_model(root / "kimi-tiny", SHAPES["kimi-tiny"], CPU)
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize("layer", [1, 4])
def test_a_skewed_bias_sends_its_share_to_the_hot_experts(layer):
    shape = SHAPES["glm"]
    hot = hot_experts(shape, layer)
    assert len(hot) == 13  # a fifth of 64
    bias = skewed_bias(shape, layer)
    assert set(np.flatnonzero(bias)) == set(hot)
    logits = np.random.default_rng(7).standard_normal((20_000, shape.experts))
    ranked = np.argsort(-(1 / (1 + np.exp(-logits)) + bias), axis=1)[:, : shape.top_k]
    share = np.isin(ranked, hot).mean()
    assert abs(share - SKEW) < 0.01, f"wanted {SKEW} of the routings, got {share}"


def test_layers_prefer_different_experts():
    shape = SHAPES["glm"]
    assert len({tuple(hot_experts(shape, layer)) for layer in shape.expert_layers}) == 5


@pytest.mark.parametrize("rows", [16, 17, 31.9, 32])
def test_a_pool_of_so_many_rows_holds_them_and_not_one_more(root, rows):
    experts = read_experts(root / "glm-tiny")
    assert msgspec.structs.astuple(experts) == (2, 16, 4, 256, 128)
    for codec in ("w2", "fp4-nv"):
        gib = experts.gib(rows, codec)
        assert int(gib * GIB) // experts.row_bytes(codec) == int(rows)
