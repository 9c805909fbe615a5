"""Codebooks that moet does not serve, and the signed errors of all.

    python -m tinymoe.variants CHECKPOINT --out FOLDER --result FILE

Writes bf16 checkpoints whose main stack's experts went through a codebook, to be measured with
`moet bench quality demo --set experts=native --set model=FOLDER/NAME --reference tinymoe`, and a
result file with each tensor's mean signed error in units of its blocks' scale.
"""

import argparse
import itertools
import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moet_cli.bench import run_result
from moet_core.floats import E2M1_VALUES, e8m0_to_float64, join_nibbles
from moet_core.quantise import W2_LEVELS, fp4_mx_nibbles, w2_codes
from moet_core.results import measurement, write_result
from moet_core.sources import Nvfp4Source
from moet_vllm.native import write_bf16_copy

__all__ = ["best_codebook", "main"]

Levels = NDArray[np.float64]
POSITIVE_ZERO, NEGATIVE_ZERO = 0, 8
Encode = Callable[[Nvfp4Source], tuple[Levels, NDArray[np.float64]]]


def _units(source: Nvfp4Source) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Return e2m1 nibbles `[N, K]` and the scale of every weight."""
    nibbles, scales = fp4_mx_nibbles(source)
    return nibbles, e8m0_to_float64(scales).repeat(32, axis=1)


def _is_symmetric(levels: Levels) -> bool:
    return bool((levels == -levels[::-1]).all())


def best_codebook(histogram: NDArray[np.float64], *, symmetric: bool = True) -> Levels:
    """Return the four e2m1 values with the least squared error for weights of 16 nibbles.

    Args:
        histogram: `[16]`, the squared scales summed over the weights of each nibble.
        symmetric: False leaves out the sets that are symmetric around 0.
    """
    values = np.unique(E2M1_VALUES)
    subsets = np.array(
        [
            levels
            for levels in itertools.combinations(values, 4)
            if symmetric or not _is_symmetric(np.array(levels))
        ]
    )
    errors = np.abs(E2M1_VALUES[None, :, None] - subsets[:, None, :]).min(2) ** 2
    return subsets[(errors * histogram).sum(1).argmin()]


def _through(levels: Levels) -> Encode:
    def encode(source: Nvfp4Source) -> tuple[Levels, NDArray[np.float64]]:
        nibbles, scale = _units(source)
        nearest = np.abs(E2M1_VALUES[:, None] - levels).argmin(1)
        return levels[nearest][nibbles], scale

    return encode


def _w2(zeros: str, positive: bool = False) -> Encode:
    """W2 with a zero mode; `positive` stores every zero as +0 first, as some exporters do."""

    def encode(source: Nvfp4Source) -> tuple[Levels, NDArray[np.float64]]:
        if positive:
            low, high = source.nibbles & 15, source.nibbles >> 4
            low = np.where(low == NEGATIVE_ZERO, POSITIVE_ZERO, low)
            high = np.where(high == NEGATIVE_ZERO, POSITIVE_ZERO, high)
            nibbles = join_nibbles(np.stack([low, high], -1).reshape(low.shape[0], -1))
            source = Nvfp4Source(source.name, nibbles, source.scale, source.scale_2)
        codes, scales = w2_codes(source, zeros=zeros)
        return W2_LEVELS[codes], e8m0_to_float64(scales).repeat(32, axis=1)

    return encode


def _sources(checkpoint: Path) -> list[Nvfp4Source]:
    """Return the routed experts' matrices of the main stack."""
    layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
    found = []
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            prefix = name.removesuffix(".weight_scale_2")
            if prefix == name or int(name.split(".")[2]) >= layers:
                continue
            scale = file.get_tensor(f"{prefix}.weight_scale").view(torch.uint8).numpy()
            weight = file.get_tensor(f"{prefix}.weight").numpy()
            found.append(Nvfp4Source(prefix, weight, scale, np.float32(file.get_tensor(name))))
    return found


def main() -> None:
    """Write the variants and the result file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    started = datetime.now(UTC)
    sources = _sources(args.checkpoint)
    units = [_units(source) for source in sources]
    histograms = [np.bincount(n.ravel(), (s**2).ravel(), 16) for n, s in units]
    best = best_codebook(np.sum(histograms, 0))
    asymmetric = best_codebook(np.sum(histograms, 0), symmetric=False)
    symmetric = sum(_is_symmetric(best_codebook(histogram)) for histogram in histograms)
    encoders = {
        "w2": _w2("auto"),
        "w2-sign": _w2("sign"),
        "w2-positive-zeros-auto": _w2("auto", positive=True),
        "w2-positive-zeros-sign": _w2("sign", positive=True),
        "asymmetric": _through(asymmetric),
    }
    measured = []
    base = write_bf16_copy(args.checkpoint, args.out / "native")
    for name, encode in encoders.items():
        tensors = load_file(base / "model.safetensors")
        bias, relative = [], []
        for source, (nibbles, scale) in zip(sources, units, strict=True):
            levels, _ = encode(source)
            error = levels - E2M1_VALUES[nibbles]
            bias.append(float(error.mean()))
            exact = (E2M1_VALUES[nibbles] * scale) ** 2
            relative.append(float(np.sqrt(((error * scale) ** 2).sum() / exact.sum())))
            tensors[f"{source.name}.weight"] = torch.from_numpy(levels * scale).bfloat16()
        measured += [
            measurement(f"mean signed error, {name}", "units", bias),
            measurement(f"relative RMS error, {name}", "fraction", relative),
        ]
        folder = args.out / name
        shutil.copytree(base, folder, dirs_exist_ok=True)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    zeros = [float(np.isin(n, (POSITIVE_ZERO, NEGATIVE_ZERO)).mean()) for n, _ in units]
    negative = [
        float((n == NEGATIVE_ZERO).sum() / max(1, np.isin(n, (0, 8)).sum())) for n, _ in units
    ]
    measured += [
        measurement("exact zeros", "fraction", zeros),
        measurement("negative zeros", "fraction of zeros", negative),
    ]
    notes = (
        f"{len(sources)} tensors: the routed experts of the main stack of TinyMoE",
        f"of all 1365 codebooks, {best.tolist()} has the least squared error over all tensors; by "
        f"itself, {symmetric} of {len(sources)} tensors choose a symmetric one",
        f"asymmetric: {asymmetric.tolist()}, the best that is not symmetric",
        "a unit is the scale of a weight's block of 32; errors are against e2m1 on the same scales",
    )
    write_result(args.result, run_result("codebooks", started, measured, notes=notes), force=True)
    for found in measured:
        print(found.name, np.mean(found.samples), np.mean(np.asarray(found.samples) < 0))
    print(*notes, sep="\n")


if __name__ == "__main__":
    main()
