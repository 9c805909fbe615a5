"""The checkpoint's quantisation decides which tensors make a matrix."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.layers.quantization import get_quantization_config

from moet_core.errors import ConfigError
from moet_vllm.formats import exact_codec, expert_format

PREFIX = "model.layers.3.mlp.experts"


def config(method: str, settings: dict[str, Any]) -> Any:
    return get_quantization_config(method).from_config(settings)


def fp8(**settings: Any) -> Any:
    return config("fp8", {"quant_method": "fp8", "activation_scheme": "dynamic", **settings})


def nvfp4(ignore: list[str]) -> Any:
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignore}
    settings.update(kv_cache_quant_algo=None, group_size=16)
    return config("modelopt_fp4", settings)


def test_no_quantisation_means_plain_weights() -> None:
    assert expert_format(None, PREFIX).needed == ("weight",)


def test_nvfp4_needs_three_tensors_and_ignores_the_activation_scale() -> None:
    found = expert_format(nvfp4(["lm_head"]), PREFIX)
    assert found.source == "nvfp4"
    assert found.needed == ("weight", "weight_scale", "weight_scale_2")
    assert found.ignored == ("input_scale",)


def test_a_layer_that_nvfp4_excludes_is_plain() -> None:
    assert expert_format(nvfp4(["model.layers.3.*"]), PREFIX).source == "float"
    assert expert_format(nvfp4(["model.layers.4.*"]), PREFIX).source == "nvfp4"


def test_mxfp4_needs_weight_and_scale() -> None:
    found = expert_format(config("mxfp4", {"quant_method": "mxfp4"}), PREFIX)
    assert (found.source, found.needed) == ("mxfp4", ("weight", "weight_scale"))


def test_fp8_carries_its_block() -> None:
    found = expert_format(fp8(weight_block_size=[64, 128]), PREFIX)
    assert (found.source, found.block) == ("fp8", (64, 128))
    assert found.needed == ("weight", "weight_scale_inv")


def test_a_layer_that_fp8_skips_is_plain() -> None:
    skipped = fp8(weight_block_size=[128, 128], modules_to_not_convert=[PREFIX])
    assert expert_format(skipped, PREFIX).source == "float"


def test_fp8_with_one_scale_a_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match="block scales"):
        expert_format(fp8(), PREFIX)


def test_an_unknown_quantisation_is_refused_with_what_is_known() -> None:
    other = SimpleNamespace(get_name=lambda: "gguf")
    with pytest.raises(ConfigError, match=r'"gguf" \(layer model\.layers\.3.*NVFP4'):
        expert_format(other, PREFIX)


def test_only_fp4_has_an_exact_codec() -> None:
    assert exact_codec(expert_format(nvfp4([]), PREFIX)) == "fp4-nv"
    assert (
        exact_codec(expert_format(config("mxfp4", {"quant_method": "mxfp4"}), PREFIX)) == "fp4-mx"
    )
    assert exact_codec(expert_format(None, PREFIX)) is None
    assert exact_codec(expert_format(fp8(weight_block_size=[128, 128]), PREFIX)) is None
