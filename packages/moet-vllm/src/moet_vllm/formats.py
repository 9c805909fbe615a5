"""Which tensors make one expert matrix, by the checkpoint's quantisation."""

from typing import Any

import msgspec

from moet_core.errors import ConfigError

__all__ = ["ExpertFormat", "exact_codec", "expert_format", "fp4_codec"]


class ExpertFormat(msgspec.Struct, frozen=True):
    """How a checkpoint stores one expert matrix.

    Attributes:
        source: "float", "fp8", "mxfp4" or "nvfp4" (see `moet_core.sources`).
        needed: suffixes of the tensors that make a matrix, the weight first.
        ignored: suffixes that a checkpoint may carry and 2-bit experts do not use (activations
            stay bf16, so their static scales have no meaning here).
        block: rows and columns that share one FP8 scale.
    """

    source: str
    needed: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    block: tuple[int, int] = (0, 0)


FLOAT = ExpertFormat("float", ("weight",))
MXFP4 = ExpertFormat("mxfp4", ("weight", "weight_scale"))
NVFP4 = ExpertFormat("nvfp4", ("weight", "weight_scale", "weight_scale_2"), ("input_scale",))


_EXACT_CODECS = {"mxfp4": "fp4-mx", "nvfp4": "fp4-nv"}


def exact_codec(source: ExpertFormat) -> str | None:
    """Return the codec that holds a checkpoint's values without a loss, None if there is none."""
    return _EXACT_CODECS.get(source.source)


def fp4_codec(source: ExpertFormat) -> str:
    """Return the codec of a checkpoint's experts at FP4: its own, or requantised to MXFP4."""
    return exact_codec(source) or "fp4-mx"


def _fp8_block(quant_config: Any) -> ExpertFormat:
    block = quant_config.weight_block_size
    if block is None:
        raise ConfigError(
            "moet cannot convert FP8 experts with one scale a tensor: it wants FP8 with block "
            "scales (weight_block_size in the checkpoint's quantization_config), found none."
        )
    rows, columns = block
    return ExpertFormat("fp8", ("weight", "weight_scale_inv"), block=(rows, columns))


def expert_format(quant_config: Any, prefix: str) -> ExpertFormat:
    """Find the format of the routed experts of one layer.

    Args:
        quant_config: vLLM's QuantizationConfig of the model, or None.
        prefix: the layer's name, such as `model.layers.3.mlp.experts`.

    Raises:
        ConfigError: a quantisation that has no conversion to 2-bit experts.
    """
    if quant_config is None:
        return FLOAT
    name = quant_config.get_name()
    if name == "modelopt_fp4":
        return FLOAT if quant_config.is_layer_excluded(prefix) else NVFP4
    if name == "mxfp4":
        return MXFP4
    if name in ("fp8", "deepseek_v4_fp8"):
        from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

        if is_layer_skipped(
            prefix=prefix,
            ignored_layers=quant_config.ignored_layers,
            fused_mapping=quant_config.packed_modules_mapping,
        ):
            return FLOAT
        if name == "fp8" and not quant_config.is_checkpoint_fp8_serialized:
            return FLOAT
        if name == "deepseek_v4_fp8" and quant_config.moe_quant_algo == "NVFP4":
            return NVFP4
        if name == "deepseek_v4_fp8" and quant_config.expert_dtype == "fp4":
            return MXFP4
        return _fp8_block(quant_config)
    raise ConfigError(
        f'moet cannot convert experts quantised as "{name}" (layer {prefix}). It converts '
        "bf16, fp16 and fp32 experts, FP8 with block scales, MXFP4 and modelopt NVFP4. Serve "
        'this checkpoint without the "moet" config, or use a checkpoint in one of those formats.'
    )
