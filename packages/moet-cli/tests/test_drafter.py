"""A model drafts for itself if its config says so and its tensors are there."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from moet_cli.drafter import check_mtp_layers
from moet_core.errors import ConfigError
from moet_vllm import tinymoe

CONFIG = {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}


@pytest.fixture
def checkpoint(tmp_path):
    """Return a function that writes a checkpoint with a config and tensors of the given names."""

    def write(config, names, *, indexed=False):
        (tmp_path / "config.json").write_text(json.dumps(config))
        if indexed:
            placed = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps(placed))
        else:
            tensors = {name: np.zeros(1, np.float32) for name in names}
            save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return write


def test_tinymoe_has_one():
    assert check_mtp_layers(tinymoe.CHECKPOINT) == 1


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("name", ["model.layers.4.eh_proj.weight", "mtp.0.enorm.weight"])
def test_its_tensors_are_found(checkpoint, name, indexed):
    folder = checkpoint(CONFIG, ["model.layers.3.mlp.gate.weight", name], indexed=indexed)
    assert check_mtp_layers(folder) == 1


def test_a_config_inside_the_config(checkpoint):
    text = {"num_hidden_layers": 4, "mtp_num_hidden_layers": 2}
    assert check_mtp_layers(checkpoint({"text_config": text}, ["mtp.layers.0.fc.weight"])) == 2


@pytest.mark.parametrize(
    "config", [{"num_hidden_layers": 4}, {**CONFIG, "num_nextn_predict_layers": 0}]
)
def test_a_model_without_any_is_refused(checkpoint, config):
    folder = checkpoint(config, ["model.layers.4.eh_proj.weight"])
    with pytest.raises(ConfigError, match=r"drafts for itself.*found none.*speculative_tokens to"):
        check_mtp_layers(folder)


@pytest.mark.parametrize("indexed", [False, True])
def test_a_checkpoint_that_lost_them_is_refused(checkpoint, indexed):
    names = ["model.layers.3.mlp.gate.weight", "model.layers.40.mlp.gate.weight"]
    folder = checkpoint(CONFIG, names, indexed=indexed)
    with pytest.raises(ConfigError, match=r"promises: found none named layers\.4 or mtp"):
        check_mtp_layers(folder)
