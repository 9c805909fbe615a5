"""The sizes of a mixture-of-experts model, read from its Hugging Face config.json."""

from typing import Any

from msgspec import Struct

from moet_core.errors import ConfigError

__all__ = [
    "DEEPSEEK_V4_FLASH",
    "GLM_5_2",
    "KIMI_K2_7",
    "ModelGeometry",
    "geometry_from_config",
    "is_main_stack_layer",
]

_ALL_MOE_TYPES = ("deepseek_v4",)
"""Model types without dense layers, whose configs have no `first_k_dense_replace`."""


class ModelGeometry(Struct, frozen=True, kw_only=True):
    """Sizes of a model's routed experts.

    Attributes:
        hidden: Hidden size H, the k of gate and up.
        intermediate: Intermediate size I of one expert, not sharded.
        experts: Routed experts of a layer.
        top_k: Experts a token is routed to.
        layers: Layers of the main stack, dense ones included.
        moe_layers: Indices of the main stack's layers with routed experts, ascending.
        drafter_layers: Layers behind the main stack that only draft tokens.
        swiglu_limit: Clamp of gate and up, None without one.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    layers: int
    moe_layers: tuple[int, ...]
    drafter_layers: int = 0
    swiglu_limit: float | None = None

    @property
    def dense_layers(self) -> int:
        """Number of main-stack layers without routed experts."""
        return self.layers - len(self.moe_layers)


def geometry_from_config(config: dict[str, Any]) -> ModelGeometry:
    """Read the geometry of glm4_moe, glm_moe_dsa, deepseek_v3 (Kimi) and deepseek_v4 configs.

    Wrappers of vision-language models keep these keys in `text_config`, which wins as a whole.

    Raises:
        ConfigError: A key is missing or impossible; the message names it.
    """
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise ConfigError(f"config.json: text_config must be an object, got {text!r}.")
    layers = _size(text, "num_hidden_layers")
    geometry = ModelGeometry(
        hidden=_size(text, "hidden_size"),
        intermediate=_size(text, "moe_intermediate_size"),
        experts=_size(text, "n_routed_experts", "num_local_experts", "num_experts"),
        top_k=_size(text, "num_experts_per_tok"),
        layers=layers,
        moe_layers=_moe_layers(text, layers),
        drafter_layers=_count(text, "num_nextn_predict_layers", default=0),
        swiglu_limit=_swiglu_limit(text),
    )
    if geometry.top_k > geometry.experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok {geometry.top_k} exceeds the number of experts, "
            f"{geometry.experts}."
        )
    return geometry


def is_main_stack_layer(geometry: ModelGeometry, index: int) -> bool:
    """Say whether layer `index` has routed experts and is no drafter."""
    return index in geometry.moe_layers


def _moe_layers(text: dict[str, Any], layers: int) -> tuple[int, ...]:
    kinds = text.get("mlp_layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ConfigError(
                f"config.json: mlp_layer_types must name each of {layers} layers, got {kinds!r}."
            )
        return tuple(index for index, kind in enumerate(kinds) if kind != "dense")
    if text.get("model_type") in _ALL_MOE_TYPES:
        return tuple(range(layers))
    first = _count(text, "first_k_dense_replace")
    every = _size(text, "moe_layer_freq") if "moe_layer_freq" in text else 1
    return tuple(index for index in range(first, layers) if index % every == 0)


def _swiglu_limit(text: dict[str, Any]) -> float | None:
    limit = text.get("swiglu_limit")
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
        raise ConfigError(f"config.json: swiglu_limit must be a positive number, got {limit!r}.")
    return float(limit)


def _size(text: dict[str, Any], *keys: str) -> int:
    """Return the positive integer under the first key there is."""
    for key in keys:
        if text.get(key) is not None:
            value = _count(text, key)
            if value == 0:
                raise ConfigError(f"config.json: {key} must be positive, got 0.")
            return value
    model_type = text.get("model_type")
    raise ConfigError(
        f"config.json of model type {model_type!r} has no {' or '.join(keys)}. "
        "Only mixture-of-experts models with these keys can be served."
    )


def _count(text: dict[str, Any], key: str, default: int | None = None) -> int:
    value = text.get(key, default)
    if value is None:
        raise ConfigError(f"config.json of model type {text.get('model_type')!r} has no {key}.")
    # bool is an int to Python; a config that says `true` here means something else.
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"config.json: {key} must be a whole number, got {value!r}.")
    return value


DEEPSEEK_V4_FLASH = ModelGeometry(
    hidden=4096,
    intermediate=2048,
    experts=256,
    top_k=6,
    layers=43,
    moe_layers=tuple(range(43)),
    drafter_layers=1,
    swiglu_limit=10.0,
)

GLM_5_2 = ModelGeometry(
    hidden=6144,
    intermediate=2048,
    experts=256,
    top_k=8,
    layers=78,
    moe_layers=tuple(range(3, 78)),
    drafter_layers=1,
)

KIMI_K2_7 = ModelGeometry(
    hidden=7168,
    intermediate=2048,
    experts=384,
    top_k=8,
    layers=61,
    moe_layers=tuple(range(1, 61)),
)
