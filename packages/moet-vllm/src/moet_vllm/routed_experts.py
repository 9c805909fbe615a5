"""The out-of-tree RoutedExperts: 2-bit where moet is configured, vLLM's own otherwise."""

from typing import Any

import torch
import vllm
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.models.utils import extract_layer_index

from moet_vllm.config import MoetConfig, parse_config
from moet_vllm.formats import expert_format
from moet_vllm.method import MoetExpertsMethod
from moet_vllm.refusals import check_layer, check_version

__all__ = ["MoetRoutedExperts", "configured", "in_main_stack"]


def configured(vllm_config: VllmConfig) -> MoetConfig | None:
    """Return the plugin's settings, or None where vLLM serves the experts by itself."""
    settings = vllm_config.additional_config
    if not isinstance(settings, dict) or "moet" not in settings:
        return None
    config = parse_config(settings["moet"])
    return None if config.experts == "native" else config


def in_main_stack(layer_name: str, vllm_config: VllmConfig) -> bool:
    """Tell whether a layer belongs to the model itself; drafters come after its last layer."""
    text_config = vllm_config.model_config.hf_text_config
    return (
        "mtp" not in layer_name.split(".")
        and extract_layer_index(layer_name) < text_config.num_hidden_layers
    )


class MoetRoutedExperts(RoutedExperts):
    """RoutedExperts whose expert weights are rows of a codec instead of checkpoint tensors."""

    def _get_quant_method(
        self, prefix: str, quant_config: Any, moe_config: Any
    ) -> FusedMoEMethodBase:
        vllm_config = get_current_vllm_config()
        config = configured(vllm_config)
        if config is None or not in_main_stack(prefix, vllm_config):
            return super()._get_quant_method(prefix, quant_config, moe_config)
        check_version(vllm.__version__)
        check_layer(self, vllm_config)
        dummy = vllm_config.load_config.load_format == "dummy"
        return MoetExpertsMethod(moe_config, config, expert_format(quant_config, prefix), dummy)

    def weight_loader(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Take one checkpoint tensor of one expert (vLLM's loading protocol)."""
        if not isinstance(self.quant_method, MoetExpertsMethod):
            return super().weight_loader(
                param, loaded_weight, weight_name, shard_id, expert_id, return_success
            )
        self.quant_method.staging.load(weight_name, shard_id, expert_id, loaded_weight)
        return True if return_success else None

    weight_loader.supports_moe_loading = True  # type: ignore[attr-defined]
