"""What E4M3 activations in routed experts cost TinyMoE, against bfloat16 ones.

    PYTHONPATH=bench python bench/kernels/activations.py bench/results/activations.json

Plain torch on a CPU, teacher-forced over the held-out texts: x and the activated values go through
`moet_kernels.sm120.activations` as they do in the SM120 kernels, everything else is as in the
reference backend. Each configuration is compared with the checkpoint's own experts and bfloat16
activations: Kullback-Leibler divergence in nats a token, first choices that differ, bits per byte.
"""

import argparse
import json
import math
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from safetensors.torch import load_file
from tinymoe.model import Moe, TinyMoe
from tinymoe.shape import Shape
from tokenizers import Tokenizer
from torch import Tensor

import moet_vllm.tinymoe
from moet_cli.bench import run_result
from moet_core.codecs import get_codec
from moet_core.results import Measurement, measurement, write_result
from moet_core.sources import Nvfp4Source
from moet_kernels.sm120.activations import dequantise, quantise

Rounding = Callable[[Tensor], Tensor]
Experts = tuple[Tensor, Tensor]
MATRICES = ("gate_proj", "up_proj", "down_proj")


def in_bfloat16(x: Tensor) -> Tensor:
    """Round to bfloat16."""
    return x.bfloat16().float()


def in_e4m3(x: Tensor, block: int) -> Tensor:
    """Round to E4M3 with a scale per `block` columns, or per vector where that is shorter."""
    codes, scales = quantise(x.numpy(), math.gcd(block, x.shape[1]))
    return torch.from_numpy(dequantise(codes, scales)).float()


def expert_weights(tensors: dict[str, Tensor], prefix: str, codec: str, experts: int) -> Experts:
    """Return gate and up [E, 2 I, H] and down [E, H, I] in float32, as a codec holds them."""
    coder = get_codec(codec)
    found: dict[str, list[Tensor]] = {matrix: [] for matrix in MATRICES}
    for expert in range(experts):
        for matrix in MATRICES:
            name = f"{prefix}.{expert}.{matrix}"
            scale = tensors[f"{name}.weight_scale"].view(torch.uint8).numpy()
            scale_2 = np.float32(tensors[f"{name}.weight_scale_2"])
            source = Nvfp4Source(name, tensors[f"{name}.weight"].numpy(), scale, scale_2)
            found[matrix].append(torch.from_numpy(coder.decode(coder.encode(source))).float())
    gate, up, down = (torch.stack(found[matrix]) for matrix in MATRICES)
    return torch.cat([gate, up], 1), down


def forward(moe: Moe, weights: Experts, rounding: Rounding, x: Tensor, _: str) -> tuple:
    """Stand in for `Moe.forward`: routed experts one by one, then the shared one."""
    scores, ids = moe.gate(x)
    values, out = rounding(x.float()), torch.zeros(x.shape, dtype=torch.float32)
    for expert in range(len(weights[0])):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        gate, up = (values[tokens] @ weights[0][expert].T).chunk(2, 1)
        routed = rounding(F.silu(gate) * up) @ weights[1][expert].T
        out.index_add_(0, tokens, routed * scores[tokens, places, None])
    return out.to(x.dtype) + moe.shared_experts(x), torch.zeros(len(weights[0]))


def load_model(tensors: dict[str, Tensor]) -> TinyMoe:
    """Return TinyMoE with everything of its checkpoint but the routed experts."""
    model = TinyMoe(Shape())
    state = {k: v.float() for k, v in tensors.items() if ".mlp.experts." not in k}
    missing, unexpected = model.load_state_dict(state, strict=False)
    left = [name for name in missing if ".mlp.experts." not in name]
    if left or unexpected:
        raise ValueError(f"the checkpoint lacks {left} and has {list(unexpected)}")
    return model


@torch.no_grad()
def log_chances(model: TinyMoe, texts: list[list[int]]) -> list[Tensor]:
    """Return log-probabilities of the next token after each of a text, float32 [L - 1, V]."""
    found = []
    for ids in texts:
        hidden, _, _ = model(torch.tensor([ids]))
        found.append(model.logits(hidden).float().log_softmax(-1)[:-1])
    return found


def compare(
    name: str, texts: list[list[int]], sizes: list[int], truth: list[Tensor], got: list[Tensor]
) -> list[Measurement]:
    """Measure a configuration, one sample a text."""
    divergence, differ, bits = [], [], []
    for ids, size, p, q in zip(texts, sizes, truth, got, strict=True):
        divergence.append(float((p.exp() * (p - q)).sum(-1).mean()))
        differ.append(float((p.argmax(-1) != q.argmax(-1)).float().mean()))
        chosen = q[torch.arange(len(q)), torch.tensor(ids[1:])]
        bits.append(float(-chosen.double().sum()) / math.log(2) / size)
    return [
        measurement(f"{name}: divergence", "nats a token", divergence),
        measurement(f"{name}: other first choice", "fraction", differ),
        measurement(f"{name}: code length", "bits a byte", bits),
    ]


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--tokens", type=int, default=512, help="most tokens of a text")
    args = parser.parse_args()
    started = datetime.now(UTC)
    torch.set_num_threads(1)
    folder = Path(moet_vllm.tinymoe.__file__).parent
    tensors = load_file(folder / "checkpoint/model.safetensors")
    tokenizer = Tokenizer.from_file(str(folder / "checkpoint/tokenizer.json"))
    held_out = json.loads((folder / "held_out.json").read_text())["texts"]
    texts = [tokenizer.encode(text["text"]).ids[: args.tokens] for text in held_out]
    sizes = [len(tokenizer.decode(ids).encode()) for ids in texts]
    model = load_model(tensors)
    roundings: dict[str, Rounding] = {
        "bfloat16": in_bfloat16,
        "E4M3 in 32": partial(in_e4m3, block=32),
        "E4M3 in 128": partial(in_e4m3, block=128),
    }
    measured: list[Measurement] = []
    truth: list[Tensor] = []
    for codec in ("fp4-nv", "w2"):
        weights = {}
        for index, layer in enumerate(model.model["layers"]):
            if not layer.dense:
                prefix = f"model.layers.{index}.mlp.experts"
                weights[layer.mlp] = expert_weights(tensors, prefix, codec, Shape().experts)
        for name, rounding in roundings.items():
            for moe, experts in weights.items():
                moe.forward = partial(forward, moe, experts, rounding)
            got = log_chances(model, texts)
            truth = truth or got
            if got is not truth:
                measured += compare(f"{codec}, {name}", texts, sizes, truth, got)
    notes = (
        f"{sum(map(len, texts))} tokens of {len(texts)} held-out texts, at most {args.tokens} of "
        "each; compared with fp4-nv, which is what the checkpoint holds, and bfloat16",
        "activated values have 64 columns, so blocks of 128 are 64 there",
        "simulated: routed experts' activations are rounded as the SM120 kernels round them",
    )
    write_result(args.result, run_result("activations", started, measured, notes=notes), force=True)


if __name__ == "__main__":
    main()
