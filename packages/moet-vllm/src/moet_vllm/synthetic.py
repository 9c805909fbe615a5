"""Seeded random Glm4Moe checkpoints in every source format, with a tokenizer and a chat template.

They stand in for a trained model where only the path matters: the demo and the tests. The text
they produce is noise.

Routing is by token: the last `ROUTING` hidden dimensions carry the token's embedding through all
layers unchanged, the routers read only those, and every token's choice has a margin. Rounding
then cannot change which experts a token visits, so that two engines that differ in rounding only
give answers that differ in rounding only.
"""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from moet_core import codecs, floats, sources
from moet_core.errors import ConfigError

__all__ = ["SOURCES", "Shape", "write_checkpoint"]

SOURCES = ("bf16", "fp8", "mxfp4", "nvfp4")
FP8_BLOCK = (128, 128)
ROUTING = 32
SPECIAL_TOKENS = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


class Shape(msgspec.Struct, frozen=True):
    """Geometry of a synthetic Glm4Moe; the defaults are the demo's."""

    hidden: int = 256
    intermediate: int = 128
    dense_intermediate: int = 512
    layers: int = 4
    dense_layers: int = 1
    experts: int = 16
    top_k: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    positions: int = 4096
    shards: int = 1


def write_checkpoint(
    folder: Path,
    *,
    source: str = "nvfp4",
    seed: int = 0,
    shape: Shape | None = None,
    decoded: str | None = None,
    zeros: str = "auto",
) -> Path:
    """Write a checkpoint unless `folder` holds the same one already; atomic.

    Args:
        folder: where to put it; an existing folder that moet did not write is left alone.
        source: format of the routed experts, one of `SOURCES`; everything else is bf16.
        seed: seed of all weights.
        shape: the model's geometry.
        decoded: name of a codec. The experts then become bf16 `decode(encode(w))` of the same
            weights: what stock vLLM must answer as soon as moet serves them with that codec.
        zeros: zero mode of that encoding.

    Returns:
        `folder`.

    Raises:
        ConfigError: unknown source, or `folder` exists and holds something else.
    """
    if source not in SOURCES:
        raise ConfigError(f"unknown source {source!r}; synthetic checkpoints: {', '.join(SOURCES)}")
    shape = shape or Shape()
    recipe = json.dumps(
        [2, source, seed, msgspec.to_builtins(shape), decoded, zeros], sort_keys=True
    )
    stamp = hashlib.sha256(recipe.encode()).hexdigest()
    marker = folder / "moet-synthetic"
    if folder.exists():
        if marker.is_file() and marker.read_text() == stamp:
            return folder
        raise ConfigError(
            f"{folder} exists and is not the synthetic checkpoint that is wanted there; "
            "name another folder or remove it"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write_config(work, shape, "bf16" if decoded else source)
        _write_tokenizer(work)
        _write_weights(work, shape, source, seed, decoded, zeros)
        (work / "moet-synthetic").write_text(stamp)
        try:
            work.rename(folder)
        except OSError:
            if not marker.is_file() or marker.read_text() != stamp:
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _vocabulary() -> dict[str, int]:
    from tokenizers.pre_tokenizers import ByteLevel

    return {token: i for i, token in enumerate((*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())))}


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _write_config(folder: Path, shape: Shape, source: str) -> None:
    config: dict[str, Any] = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "torch_dtype": "bfloat16",
        "vocab_size": len(_vocabulary()),
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
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_qk_norm": False,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    quantization = _quantization(shape, source)
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"eos_token_id": 0, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation))


def _quantization(shape: Shape, source: str) -> dict[str, Any] | None:
    if source == "nvfp4":
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "ignore": ["lm_head", "*self_attn*", "*shared_experts*", "model.layers.0.mlp*"],
        }
    if source == "mxfp4":
        return {"quant_method": "mxfp4"}
    if source == "fp8":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": list(FP8_BLOCK),
            "modules_to_not_convert": _bf16_linears(shape),
        }
    return None


def _bf16_linears(shape: Shape) -> list[str]:
    names = ["lm_head"]
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        names += [f"{prefix}.self_attn.{p}_proj" for p in "qkvo"]
        mlp = "mlp" if layer < shape.dense_layers else "mlp.shared_experts"
        names += [f"{prefix}.{mlp}.{p}_proj" for p in ("gate", "up", "down")]
    return names


class _Random:
    """Seeded normal weights; the draw of a tensor depends on its name only."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, name: str, *size: int, std: float) -> np.ndarray:
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        return (generator.standard_normal(size) * std).astype(np.float32)


def _write_weights(
    folder: Path, shape: Shape, source: str, seed: int, decoded: str | None, zeros: str
) -> None:
    random = _Random(seed)
    tensors: dict[str, torch.Tensor] = {}

    def linear(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        weight = random(name, rows, columns, std=gain / columns**0.5)
        if rows == shape.hidden and name.endswith(("o_proj", "down_proj")):
            weight[-ROUTING:] = 0
        tensors[f"{name}.weight"] = torch.from_numpy(weight).bfloat16()

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = torch.ones(shape.hidden, dtype=torch.bfloat16)

    def gated(name: str, intermediate: int) -> None:
        linear(f"{name}.gate_proj", intermediate, shape.hidden)
        linear(f"{name}.up_proj", intermediate, shape.hidden)
        linear(f"{name}.down_proj", shape.hidden, intermediate)

    vocabulary = len(_vocabulary())
    routers = [_router(random, shape, layer) for layer in range(shape.dense_layers, shape.layers)]
    embedding = random("embed", vocabulary, shape.hidden, std=1.0)
    for token in range(vocabulary):
        embedding[token, -ROUTING:] = _routing_part(random, shape, token, routers)
    tensors["model.embed_tokens.weight"] = torch.from_numpy(embedding).bfloat16()
    # Half of the usual gain keeps logits where bfloat16 resolves them to 1/128.
    linear("lm_head", vocabulary, shape.hidden, gain=0.5)
    norm("model.norm")
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        norm(f"{prefix}.input_layernorm")
        norm(f"{prefix}.post_attention_layernorm")
        linear(f"{prefix}.self_attn.q_proj", shape.heads * shape.head_dim, shape.hidden)
        linear(f"{prefix}.self_attn.k_proj", shape.kv_heads * shape.head_dim, shape.hidden)
        linear(f"{prefix}.self_attn.v_proj", shape.kv_heads * shape.head_dim, shape.hidden)
        linear(f"{prefix}.self_attn.o_proj", shape.hidden, shape.heads * shape.head_dim)
        if layer < shape.dense_layers:
            gated(f"{prefix}.mlp", shape.dense_intermediate)
            continue
        gated(f"{prefix}.mlp.shared_experts", shape.intermediate)
        router, bias = routers[layer - shape.dense_layers]
        gate = np.zeros((shape.experts, shape.hidden), dtype=np.float32)
        gate[:, -ROUTING:] = router
        tensors[f"{prefix}.mlp.gate.weight"] = torch.from_numpy(gate)
        tensors[f"{prefix}.mlp.gate.e_score_correction_bias"] = torch.from_numpy(bias)
        for expert in range(shape.experts):
            for matrix, rows, columns in (
                ("gate", shape.intermediate, shape.hidden),
                ("up", shape.intermediate, shape.hidden),
                ("down", shape.hidden, shape.intermediate),
            ):
                name = f"{prefix}.mlp.experts.{expert}.{matrix}_proj"
                weight = random(name, rows, columns, std=1.5 / columns**0.5)
                if matrix == "down":
                    weight[-ROUTING:] = 0
                stored = _quantise(name, weight, source)
                if decoded is not None:
                    stored = {"weight": _decoded(name, stored, source, decoded, zeros)}
                for suffix, tensor in stored.items():
                    tensors[f"{name}.{suffix}"] = tensor
    _save(folder, tensors, shape.shards)


def _router(random: _Random, shape: Shape, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a router float32 `[experts, ROUTING]` and its correction bias `[experts]`."""
    router = random(f"router.{layer}", shape.experts, ROUTING, std=2 / ROUTING**0.5)
    return router, random(f"bias.{layer}", shape.experts, std=0.01)


def _routing_part(
    random: _Random, shape: Shape, token: int, routers: list[tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    """Draw a token's routing dimensions until every router prefers its choice by a margin.

    The margin holds for the range of scales that the norm before the router can give.
    """
    margin = 0.3 / shape.experts
    for attempt in range(10_000):
        part = random(f"embed.{token}.{attempt}", ROUTING, std=1.0)
        for scale in (1.0, 0.7, 0.5, 0.35):
            scores = [1 / (1 + np.exp(-scale * (router @ part))) + bias for router, bias in routers]
            ranked = np.sort(scores, axis=1)[:, ::-1]
            if (ranked[:, shape.top_k - 1] - ranked[:, shape.top_k]).min() < margin:
                break
        else:
            return part
    raise ConfigError(
        f"no routing with a margin was found for {shape}; use fewer layers or experts"
    )


def _quantise(name: str, weight: np.ndarray, source: str) -> dict[str, torch.Tensor]:
    """Turn float32 `[rows, columns]` into what a checkpoint of that format stores."""
    if source == "bf16":
        return {"weight": torch.from_numpy(weight).bfloat16()}
    full = sources.FloatSource(name, weight)
    if source == "mxfp4":
        nibbles, scales = codecs.fp4_mx_nibbles(full)
        packed = floats.join_nibbles(nibbles)
        return {"weight": torch.from_numpy(packed), "weight_scale": torch.from_numpy(scales)}
    if source == "nvfp4":
        nibbles, scales, scale_2 = codecs.fp4_nv_nibbles(full)
        return {
            "weight": torch.from_numpy(floats.join_nibbles(nibbles)),
            "weight_scale": torch.from_numpy(scales).view(torch.float8_e4m3fn),
            "weight_scale_2": torch.tensor(scale_2, dtype=torch.float32),
            "input_scale": torch.tensor(1.0, dtype=torch.float32),
        }
    return _quantise_fp8(torch.from_numpy(weight))


def _quantise_fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = FP8_BLOCK
    grid = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    scale = torch.empty(grid, dtype=torch.float32)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(grid[0]):
        for j in range(grid[1]):
            part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scale[i, j] = weight[part].abs().max() / 448
            codes[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}


def _decoded(
    name: str, stored: dict[str, torch.Tensor], source: str, codec: str, zeros: str
) -> torch.Tensor:
    def array(suffix: str) -> np.ndarray:
        tensor = stored[suffix]
        return (tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor).numpy()

    full: Any
    if source == "bf16":
        bits = stored["weight"].view(torch.int16).numpy().view(np.uint16)
        full = sources.FloatSource(name, bits, bf16=True)
    elif source == "mxfp4":
        full = sources.Mxfp4Source(name, array("weight"), array("weight_scale"))
    elif source == "nvfp4":
        scale_2 = float(stored["weight_scale_2"])
        full = sources.Nvfp4Source(name, array("weight"), array("weight_scale"), scale_2)
    else:
        full = sources.Fp8Source(name, array("weight"), array("weight_scale_inv"), block=FP8_BLOCK)
    chosen = codecs.get_codec(codec)
    values = chosen.decode(chosen.encode(full, zeros=zeros))
    return torch.from_numpy(values).bfloat16()


def _save(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
