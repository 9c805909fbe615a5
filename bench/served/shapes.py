"""Geometry of the models served here: GLM-5.2 and Kimi-K2 layers, few of them, and tiny twins."""

from typing import Any

import msgspec

__all__ = ["SHAPES", "Indexer", "Shape", "config"]


class Indexer(msgspec.Struct, frozen=True, kw_only=True):
    """Sparse attention's index of keys (DeepSeek sparse attention)."""

    heads: int
    head_dim: int
    top_k: int


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A DeepSeek-like stack: dense layers first, then routed experts, latent attention in all.

    Attributes:
        architecture: vLLM's model class.
        model_type: Transformers' config class.
        hidden: Width of the residual stream.
        dense: Intermediate width of the dense layers.
        intermediate: Intermediate width of one expert.
        layers: All layers.
        dense_layers: Those before the first layer with experts.
        experts: Routed experts of a layer; there is one shared expert besides.
        top_k: Experts a token is routed to.
        heads: Attention heads.
        query_rank, key_rank: Ranks of the latent queries and keys.
        nope, rope, value: Widths of a head: without position, with position, of its values.
        vocabulary: Tokens. In proportion to the depth, so that the head's share of a step is that
            of the whole model.
        scaling: Factor on the routed experts' sum.
        indexer: Of sparse attention, None where attention is dense.
    """

    architecture: str
    model_type: str
    hidden: int
    dense: int
    intermediate: int
    layers: int
    dense_layers: int = 1
    experts: int = 64
    top_k: int = 8
    heads: int = 64
    query_rank: int
    key_rank: int = 512
    nope: int
    rope: int = 64
    value: int
    vocabulary: int = 12288
    scaling: float
    indexer: Indexer | None = None

    @property
    def expert_layers(self) -> range:
        """Indices of the layers with routed experts."""
        return range(self.dense_layers, self.layers)


GLM = Shape(
    architecture="GlmMoeDsaForCausalLM",
    model_type="glm_moe_dsa",
    hidden=6144,
    dense=12288,
    intermediate=2048,
    layers=6,
    query_rank=2048,
    nope=192,
    value=256,
    scaling=2.5,
    indexer=Indexer(heads=32, head_dim=128, top_k=2048),
)

KIMI = Shape(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    hidden=7168,
    dense=18432,
    intermediate=2048,
    layers=5,
    query_rank=1536,
    nope=128,
    value=128,
    scaling=2.827,
)

_TINY = {
    "hidden": 256,
    "dense": 256,
    "intermediate": 128,
    "layers": 3,
    "experts": 16,
    "top_k": 4,
    "heads": 4,
    "query_rank": 64,
    "key_rank": 64,
    "nope": 32,
    "rope": 32,
    "value": 32,
    "vocabulary": 512,
}

SHAPES = {
    "glm": GLM,
    "kimi": KIMI,
    "glm-short": msgspec.structs.replace(GLM, layers=4),
    "kimi-short": msgspec.structs.replace(KIMI, layers=3),
    # More layers, so that the scheduler's share of a step is smaller.
    "glm-deep": msgspec.structs.replace(GLM, layers=9, vocabulary=18432),
    "glm-long": msgspec.structs.replace(GLM, layers=13, vocabulary=24576),
    "glm-tall": msgspec.structs.replace(GLM, layers=17, vocabulary=32768),
    "kimi-deep": msgspec.structs.replace(KIMI, layers=8, vocabulary=18432),
    "glm-tiny": msgspec.structs.replace(
        GLM, **_TINY, indexer=Indexer(heads=4, head_dim=64, top_k=32)
    ),
    "kimi-tiny": msgspec.structs.replace(KIMI, **_TINY),
}


def config(shape: Shape) -> dict[str, Any]:
    """Return the model's config.json; its experts are modelopt NVFP4, all else bf16."""
    found: dict[str, Any] = {
        "architectures": [shape.architecture],
        "model_type": shape.model_type,
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.dense,
        "moe_intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "first_k_dense_replace": shape.dense_layers,
        "moe_layer_freq": 1,
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": shape.top_k,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": shape.scaling,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": shape.query_rank,
        "kv_lora_rank": shape.key_rank,
        "qk_nope_head_dim": shape.nope,
        "qk_rope_head_dim": shape.rope,
        "v_head_dim": shape.value,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "ignore": [
                "lm_head",
                "*self_attn*",
                "*shared_experts*",
                "*mlp.gate",
                *(f"model.layers.{layer}.mlp*" for layer in range(shape.dense_layers)),
            ],
        },
    }
    if shape.indexer is not None:
        found["index_topk"] = shape.indexer.top_k
        found["index_head_dim"] = shape.indexer.head_dim
        found["index_n_heads"] = shape.indexer.heads
        found["indexer_rope_interleave"] = True
    return found
