"""What 2-bit experts cannot honour is refused, each with its name and a way out."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from moet_core.errors import ConfigError
from moet_vllm.refusals import check_layer, check_version

PARALLEL = {
    "enable_eplb": False,
    "use_ep": False,
    "dp_size": 1,
    "pcp_size": 1,
    "sp_size": 1,
}
ENGINE = {"enable_dbo": False, "enable_eplb": False, "enable_expert_parallel": False}
MOE = {
    "activation": MoEActivation.SILU,
    "has_bias": False,
    "is_lora_enabled": False,
    "in_dtype": torch.bfloat16,
}
LAYER = {
    "layer_name": "model.layers.3.mlp.experts",
    "apply_router_weight_on_input": False,
    "swiglu_alpha": None,
    "swiglu_beta": None,
    "swiglu_limit": None,
}


def check(where: str = "", **changed: Any) -> None:
    groups = {
        "parallel": dict(PARALLEL),
        "moe": dict(MOE),
        "layer": dict(LAYER),
        "engine": dict(ENGINE),
    }
    if where:
        groups[where].update(changed)
    moe = SimpleNamespace(
        moe_parallel_config=SimpleNamespace(**groups["parallel"]), **groups["moe"]
    )
    layer = SimpleNamespace(moe_config=moe, **groups["layer"])
    check_layer(layer, SimpleNamespace(parallel_config=SimpleNamespace(**groups["engine"])))


def test_a_plain_layer_passes() -> None:
    check()


def test_a_clamped_silu_passes() -> None:
    check("layer", swiglu_limit=10.0)


def test_neutral_swiglu_parameters_pass() -> None:
    check("layer", swiglu_alpha=1.0, swiglu_beta=0.0)


@pytest.mark.parametrize(
    ("where", "changed", "named"),
    [
        ("parallel", {"enable_eplb": True}, "--enable-eplb"),
        ("parallel", {"use_ep": True}, "--enable-expert-parallel"),
        ("parallel", {"dp_size": 2}, "data parallelism"),
        ("parallel", {"pcp_size": 2}, "prefill context"),
        ("parallel", {"sp_size": 2}, "sequence parallelism"),
        ("engine", {"enable_dbo": True}, "--enable-dbo"),
        ("engine", {"enable_eplb": True}, "--enable-eplb"),
        ("engine", {"enable_expert_parallel": True}, "--enable-expert-parallel"),
        ("moe", {"is_lora_enabled": True}, "--enable-lora"),
        ("moe", {"activation": MoEActivation.GELU}, "'gelu'"),
        ("moe", {"has_bias": True}, "biases"),
        ("moe", {"in_dtype": torch.float16}, "float16"),
        ("layer", {"apply_router_weight_on_input": True}, "router weights"),
        ("layer", {"swiglu_alpha": 1.7}, "alpha 1.7"),
        ("layer", {"swiglu_limit": 0.0}, "limit of 0.0"),
    ],
)
def test_what_cannot_be_honoured_is_named(where: str, changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as error:
        check(where, **changed)
    assert "model.layers.3.mlp.experts" in str(error.value)


@pytest.mark.parametrize("version", ["0.24.0", "0.24.0+cpu"])
def test_the_right_vllm_passes(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.23.0", "0.24.1", "0.25.0+cu130"])
def test_another_vllm_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=version.replace("+", r"\+")):
        check_version(version)
