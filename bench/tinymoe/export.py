"""Write a trained model as a checkpoint: experts in modelopt NVFP4, the rest bf16.

    python -m tinymoe.export WEIGHTS... --out FOLDER

The same weights give the same bytes.
"""

import argparse
import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tinymoe.chat import END, STOPS
from tinymoe.nvfp4 import quantise
from tinymoe.shape import Shape, config_json
from tinymoe.tokenizer import read_tokenizer

__all__ = ["checkpoint_tensors", "sha256_of", "write_checkpoint"]


def checkpoint_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors by name, of the `state_dict` of a `TinyMoe`."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up"):
            prefix = name.removesuffix("gate_up")
            half = tensor.shape[1] // 2
            packed, scale, scale_2 = quantise(tensor.float())
            for matrix, rows in (("gate_proj", slice(0, half)), ("up_proj", slice(half, None))):
                _add(found, prefix, matrix, packed[:, rows], scale[:, rows], scale_2)
        elif name.endswith("experts.down"):
            _add(found, name.removesuffix("down"), "down_proj", *quantise(tensor.float()))
        elif name.endswith("e_score_correction_bias"):
            found[name] = tensor.float()
        else:
            found[name] = tensor.bfloat16()
    return found


def _add(
    found: dict[str, Tensor],
    prefix: str,
    matrix: str,
    packed: Tensor,
    scale: Tensor,
    tensor: Tensor,
) -> None:
    for expert in range(packed.shape[0]):
        name = f"{prefix}{expert}.{matrix}"
        found[f"{name}.weight"] = packed[expert].contiguous()
        found[f"{name}.weight_scale"] = scale[expert].contiguous()
        found[f"{name}.weight_scale_2"] = tensor[expert].clone()
        found[f"{name}.input_scale"] = torch.tensor(1.0)


def write_checkpoint(state: dict[str, Tensor], shape: Shape, folder: Path, work: Path) -> str:
    """Write config.json, generation_config.json and model.safetensors; return the latter's sha256.

    Args:
        state: weights in any floating dtype, on the CPU.
        shape: their geometry.
        folder: where to.
        work: the folder with the tokenizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = read_tokenizer(work)
    stops = [tokenizer.token_to_id(text) for text in STOPS]
    pad = tokenizer.token_to_id(END)
    config = config_json(shape, stops, pad)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"eos_token_id": stops, "pad_token_id": pad, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    save_file(checkpoint_tensors(state), folder / "model.safetensors", {"format": "pt"})
    return sha256_of(folder / "model.safetensors")


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Export weights that `tinymoe.train run` wrote."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("weights", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    state: dict[str, Tensor] = {}
    for path in args.weights:
        state |= torch.load(path, map_location="cpu")
    print(write_checkpoint(state, Shape(), args.out, args.work))


if __name__ == "__main__":
    main()
