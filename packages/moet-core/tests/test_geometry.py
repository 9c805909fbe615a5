import pytest

from moet_core.errors import ConfigError
from moet_core.geometry import (
    DEEPSEEK_V4_FLASH,
    GLM_5_2,
    KIMI_K2_7,
    geometry_from_config,
    is_main_stack_layer,
)

GLM = {
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
}
KIMI = {
    "model_type": "kimi_k25",
    "text_config": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
    },
}
DEEPSEEK = {
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 43,
    "num_nextn_predict_layers": 1,
    "swiglu_limit": 10,
}


def changed(**keys):
    return GLM | keys


def without(key):
    return {name: value for name, value in GLM.items() if name != key}


@pytest.mark.parametrize(
    ("config", "geometry"), [(GLM, GLM_5_2), (KIMI, KIMI_K2_7), (DEEPSEEK, DEEPSEEK_V4_FLASH)]
)
def test_configs_of_the_three_models(config, geometry):
    assert geometry_from_config(config) == geometry


@pytest.mark.parametrize(
    ("geometry", "dense"), [(GLM_5_2, 3), (KIMI_K2_7, 1), (DEEPSEEK_V4_FLASH, 0)]
)
def test_dense_layers(geometry, dense):
    assert geometry.dense_layers == dense


def test_glm4_moe_has_the_same_keys_and_no_drafter_by_default():
    config = without("num_nextn_predict_layers") | {"model_type": "glm4_moe"}
    assert geometry_from_config(config).drafter_layers == 0


def test_main_stack_layers_are_neither_dense_nor_drafters():
    assert not is_main_stack_layer(GLM_5_2, 2)
    assert is_main_stack_layer(GLM_5_2, 3)
    assert is_main_stack_layer(GLM_5_2, 77)
    assert not is_main_stack_layer(GLM_5_2, 78)


@pytest.mark.parametrize("key", ["n_routed_experts", "num_local_experts", "num_experts"])
def test_spellings_of_the_number_of_experts(key):
    assert geometry_from_config(without("n_routed_experts") | {key: 64}).experts == 64


def test_moe_layer_freq_counts_from_layer_zero():
    config = changed(num_hidden_layers=8, first_k_dense_replace=1, moe_layer_freq=3)
    assert geometry_from_config(config).moe_layers == (3, 6)


def test_mlp_layer_types_win():
    config = changed(num_hidden_layers=4, mlp_layer_types=["dense", "sparse", "dense", "sparse"])
    assert geometry_from_config(config).moe_layers == (1, 3)


def test_hash_routed_layers_have_routed_experts():
    config = DEEPSEEK | {"num_hidden_layers": 2, "mlp_layer_types": ["hash_moe", "moe"]}
    assert geometry_from_config(config).moe_layers == (0, 1)


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "moe_intermediate_size",
        "n_routed_experts",
        "num_experts_per_tok",
        "num_hidden_layers",
        "first_k_dense_replace",
    ],
)
def test_a_missing_key_is_named(key):
    with pytest.raises(ConfigError, match=f"'glm_moe_dsa' has no {key}"):
        geometry_from_config(without(key))


@pytest.mark.parametrize("value", [True, "8", 8.0, -1])
def test_a_size_must_be_a_whole_number(value):
    with pytest.raises(ConfigError, match=f"per_tok must be a whole number, got {value!r}"):
        geometry_from_config(changed(num_experts_per_tok=value))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be positive"),
        ({"num_experts_per_tok": 257}, "257 exceeds the number of experts, 256"),
        ({"swiglu_limit": 0}, "swiglu_limit must be a positive number, got 0"),
        ({"swiglu_limit": True}, "swiglu_limit must be a positive number, got True"),
        ({"mlp_layer_types": ["sparse"]}, "must name each of 78 layers"),
        ({"text_config": 5}, "text_config must be an object, got 5"),
    ],
)
def test_impossible_values_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        geometry_from_config(changed(**change))
