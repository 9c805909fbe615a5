"""The out-of-tree RoutedExperts: 2-bit where moet is configured, vLLM's own otherwise.

A drafter's experts keep the checkpoint's precision: a drafter that guesses worse costs more steps
than its smaller experts save.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.models.utils import extract_layer_index

from moet_core.errors import ConfigError
from moet_vllm.config import MoetConfig, parse_config
from moet_vllm.formats import ExpertFormat, exact_codec, expert_format
from moet_vllm.method import MoetExpertsMethod
from moet_vllm.patches import PATCHES, apply_patches
from moet_vllm.refusals import check_layer, check_version

__all__ = ["MoetRoutedExperts", "configured", "has_settings", "in_main_stack", "vllm_method"]

logger = init_logger("vllm.moet")


def has_settings(vllm_config: VllmConfig) -> bool:
    """Tell whether moet is configured at all, be it to leave the experts to vLLM."""
    settings = vllm_config.additional_config
    return isinstance(settings, dict) and "moet" in settings


def configured(vllm_config: VllmConfig) -> MoetConfig | None:
    """Return the plugin's settings, or None where vLLM serves the experts by itself."""
    if not has_settings(vllm_config):
        return None
    config = parse_config(vllm_config.additional_config["moet"])
    return None if config.experts == "native" else config


def in_main_stack(layer_name: str, vllm_config: VllmConfig) -> bool:
    """Tell whether a layer belongs to the model itself; drafters come after its last layer."""
    text_config = vllm_config.model_config.hf_text_config
    return (
        "mtp" not in layer_name.split(".")
        and extract_layer_index(layer_name) < text_config.num_hidden_layers
    )


def vllm_method(build: Callable[[], FusedMoEMethodBase]) -> FusedMoEMethodBase | None:
    """Build vLLM's own method of a layer; None if it has no kernel for it on this machine."""
    try:
        method = build()
    except NotImplementedError:
        return None  # what vLLM's selection raises where no kernel fits
    # Off CUDA the selection for MXFP4 does not raise.
    has_none = getattr(method, "mxfp4_backend", None) is Mxfp4MoeBackend.NONE
    return None if has_none else method


class MoetRoutedExperts(RoutedExperts):
    """RoutedExperts whose expert weights are rows of a codec instead of checkpoint tensors."""

    def _get_quant_method(
        self, prefix: str, quant_config: Any, moe_config: Any
    ) -> FusedMoEMethodBase:
        vllm_config = get_current_vllm_config()
        if has_settings(vllm_config):
            # The first place in a worker that knows the engine's configuration.
            apply_patches(PATCHES, vllm_config)
        config = configured(vllm_config)
        stock = partial(super()._get_quant_method, prefix, quant_config, moe_config)
        if config is None:
            return stock()
        drafter_codec = None
        if not in_main_stack(prefix, vllm_config):
            method = vllm_method(stock)
            if method is not None:
                return method
            drafter_codec = _drafter_codec(prefix, expert_format(quant_config, prefix))
        check_version(vllm.__version__)
        check_layer(self, vllm_config)
        return MoetExpertsMethod(
            moe_config,
            config,
            expert_format(quant_config, prefix),
            vllm_config.load_config.load_format == "dummy",
            drafter_codec=drafter_codec,
        )

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


def _drafter_codec(layer_name: str, source: ExpertFormat) -> str:
    codec = exact_codec(source)
    if codec is None:
        raise ConfigError(
            f"vLLM has no kernel on this machine for the {source.source} experts of the drafter's "
            f"layer {layer_name}, and moet serves drafters at the checkpoint's precision, which it "
            "can for MXFP4 and NVFP4. Serve without speculative decoding."
        )
    logger.info(
        "moet: vLLM has no kernel on this machine for the %s experts of the drafter's layer %s; "
        "they are served as %s, with the checkpoint's own values",
        source.source,
        layer_name,
        codec,
    )
    return codec
