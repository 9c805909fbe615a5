"""Names of checkpoints to folders: TinyMoE, and those that `served.models` writes."""

import json
from pathlib import Path
from typing import Any

import torch

from moet_vllm.tinymoe import CHECKPOINT
from served.models import write_model
from served.shapes import SHAPES

__all__ = ["device", "environment", "folder", "vocabulary"]


def device() -> torch.device:
    """Return where engines run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def folder(root: Path, name: str) -> Path:
    """Return a checkpoint's folder; it is written first if need be.

    Args:
        root: Where checkpoints are written.
        name: "tinymoe", a name of `SHAPES`, or one with "-skewed" behind it.
    """
    if name == "tinymoe":
        return CHECKPOINT
    plain = name.removesuffix("-skewed")
    write_model(root / plain, SHAPES[plain], device())
    return root / name


def vocabulary(model: Path) -> int:
    """Return the number of a checkpoint's tokens."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return int(config["vocab_size"])


def environment() -> dict[str, str]:
    """Return what engines need on this machine: a CPU has no latent attention."""
    if device().type == "cuda":
        return {}
    return {"VLLM_MLA_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
