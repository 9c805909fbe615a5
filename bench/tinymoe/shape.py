"""Geometry of TinyMoE and the config.json that describes it to vLLM and transformers."""

from dataclasses import dataclass
from typing import Any

__all__ = ["IGNORED", "SMOKE", "Shape", "config_json"]

# Patterns of modelopt's "ignore": what is bf16 in the checkpoint.
IGNORED = ("lm_head", "*self_attn*", "*shared_experts*", "model.layers.0.mlp*", "*eh_proj*")


@dataclass(frozen=True)
class Shape:
    """Sizes of a Glm4Moe: `layers` counts the dense ones, the MTP layer comes after them.

    A plain dataclass: training needs torch, numpy and tokenizers, and nothing of moet.
    """

    vocabulary: int = 4096
    hidden: int = 128
    intermediate: int = 64
    dense_intermediate: int = 512
    layers: int = 9
    dense_layers: int = 1
    experts: int = 64
    top_k: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary: float = 0.5
    rope_theta: float = 10000.0
    positions: int = 4096
    norm_eps: float = 1e-5


SMOKE = Shape(vocabulary=1024, hidden=64, dense_intermediate=128, layers=3, experts=8, top_k=2)


def config_json(shape: Shape, stop_ids: list[int], pad_id: int) -> dict[str, Any]:
    """Return config.json of a checkpoint whose routed experts are modelopt NVFP4."""
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.dense_intermediate,
        "moe_intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "first_k_dense_replace": shape.dense_layers,
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": shape.top_k,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "partial_rotary_factor": shape.rotary,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_qk_norm": True,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
        "eos_token_id": stop_ids,
        "pad_token_id": pad_id,
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "ignore": list(IGNORED),
        },
    }
