"""Finds the layers of a checkpoint that can draft tokens: multi-token prediction (MTP)."""

import re
from pathlib import Path
from typing import Any

import msgspec

from moet_core.checkpoint import read_header
from moet_core.errors import ConfigError

__all__ = ["check_mtp_layers"]

# As GLM and DeepSeek name their number, and as Qwen does.
_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def check_mtp_layers(folder: Path) -> int:
    """Return the number of MTP layers that a checkpoint holds.

    vLLM serves a checkpoint that only claims to have such layers with random ones: no draft is
    ever accepted, and nothing says why. So their tensors are looked for, too.

    Args:
        folder: The checkpoint.

    Raises:
        ConfigError: It has none, or not their tensors.
    """
    config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    text = {**config, **config.get("text_config", {})}
    layers = next((text[key] for key in _KEYS if text.get(key)), 0)
    off = "Set speculative_tokens to 0, or use a checkpoint with its MTP layers."
    if not layers:
        raise ConfigError(
            f"speculative_tokens needs a model that drafts for itself: wanted {_KEYS[0]} above 0 "
            f"in {folder / 'config.json'}, found none. {off}"
        )
    first = text["num_hidden_layers"]
    of_drafter = re.compile(rf"(^|\.)(mtp|layers\.{first})\.")
    if not any(of_drafter.search(name) for name in _tensor_names(folder)):
        raise ConfigError(
            f"speculative_tokens needs the tensors of the model's {layers} MTP layer(s), which "
            f"config.json promises: found none named layers.{first} or mtp in {folder}. {off}"
        )
    return layers


def _tensor_names(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return list(msgspec.json.decode(index.read_bytes())["weight_map"])
    return [name for file in folder.glob("*.safetensors") for name in read_header(file)]
