"""A bf16 copy of an NVFP4 checkpoint, to serve it at its own precision where FP4 cannot run.

vLLM has no NVFP4 experts for a CPU. The copy's experts hold the values that the checkpoint's
nibbles and scales stand for; rounding them to bf16 changes nothing where the tensor scales are
powers of two, as in TinyMoE (e2m1 * e4m3 has six significant bits).
"""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moet_core.errors import ConfigError
from moet_core.sources import Nvfp4Source, to_float64

__all__ = ["write_bf16_copy"]

EXTRA = ("weight_scale", "weight_scale_2", "input_scale")


def write_bf16_copy(checkpoint: Path, folder: Path) -> Path:
    """Write the copy; atomic, and an existing `folder` is taken for a finished copy.

    Args:
        checkpoint: a folder with one model.safetensors and modelopt NVFP4 tensors in it.
        folder: where to.

    Returns:
        `folder`.

    Raises:
        ConfigError: the checkpoint is not NVFP4, or its values do not fit into bf16.
    """
    if folder.is_dir():
        return folder
    config = json.loads((checkpoint / "config.json").read_text())
    algorithm = config.pop("quantization_config", {}).get("quant_algo")
    if algorithm != "NVFP4":
        raise ConfigError(f"{checkpoint}: wanted quant_algo NVFP4 in config.json, got {algorithm}.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for path in checkpoint.iterdir():
            if path.suffix in (".json", ".jinja") and path.name != "config.json":
                shutil.copy(path, work)
        (work / "config.json").write_text(json.dumps(config, indent=1))
        save_file(_tensors(checkpoint / "model.safetensors"), work / "model.safetensors")
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    found = {}
    with safe_open(path, "pt") as file:
        names = set(file.keys())
        for name in sorted(names):
            prefix, _, suffix = name.rpartition(".")
            if suffix in EXTRA:
                continue
            if f"{prefix}.weight_scale_2" not in names:
                found[name] = file.get_tensor(name)
                continue
            scale, scale_2 = (file.get_tensor(f"{prefix}.{part}") for part in EXTRA[:2])
            source = Nvfp4Source(
                prefix,
                file.get_tensor(name).numpy(),
                scale.view(torch.uint8).numpy(),
                np.float32(scale_2.item()),
            )
            exact = torch.from_numpy(to_float64(source))
            found[name] = exact.bfloat16()
            if not torch.equal(found[name].double(), exact):
                raise ConfigError(
                    f"{name}: wanted NVFP4 values that bf16 holds exactly (tensor scales that are "
                    f"powers of two), got weight_scale_2 = {scale_2.item()}."
                )
    return found
