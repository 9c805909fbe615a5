"""Measure the exported checkpoint in plain torch, on held-out data: drafts and routing.

    python -m tinymoe.report CHECKPOINT WORK --result FILE --log LOG [--ngram BITS_PER_BYTE]

What the serving path measures (`moet bench quality`) is not repeated here.
"""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from moet_cli.bench import run_result
from moet_core.results import Measurement, measurement, write_result
from moet_vllm.native import write_bf16_copy
from tinymoe.chat import render
from tinymoe.data import Streams, generator
from tinymoe.evaluate import SHARES, bits_per_byte, mtp_acceptance
from tinymoe.model import TinyMoe
from tinymoe.shape import Shape
from tinymoe.tokenizer import encode_parts, read_tokenizer

__all__ = ["read_checkpoint"]

CONVERSATIONS = 24  # of each skill
TEXT_ROWS, TEXT_TOKENS = 8, 1024


def read_checkpoint(copy: Path, shape: Shape) -> TinyMoe:
    """Return the model whose bf16 copy (`moet_vllm.native`) lies in a folder."""
    tensors = load_file(copy / "model.safetensors")
    model = TinyMoe(shape)
    state = {}
    for name in model.state_dict():
        prefix, _, last = name.rpartition(".")
        if last not in ("gate_up", "down"):
            state[name] = tensors[name]
            continue
        matrices = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}[last]
        state[name] = torch.stack(
            [
                torch.cat([tensors[f"{prefix}.{expert}.{m}.weight"] for m in matrices])
                for expert in range(shape.experts)
            ]
        )
    model.load_state_dict(state)
    return model.eval()


@torch.no_grad()
def _row(model: TinyMoe, tokens: np.ndarray) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return first choices, drafts, losses and loads of one unpadded row."""
    batch = torch.from_numpy(tokens.astype(np.int64))[None]
    hidden, drafted, loads = model(batch)
    logits = model.logits(hidden).float()[:-1]
    losses = torch.nn.functional.cross_entropy(logits, batch[0, 1:], reduction="none")
    drafts = model.logits(drafted).argmax(-1)
    return logits.argmax(-1)[None], drafts[None], losses, loads


def main() -> None:
    """Write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--copy", type=Path, required=True, help="where the bf16 copy goes")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--ngram", type=float, required=True, help="what tinymoe.ngram printed")
    args = parser.parse_args()
    started = datetime.now(UTC)
    shape = Shape()
    model = read_checkpoint(write_bf16_copy(args.checkpoint, args.copy), shape)
    tokenizer = read_tokenizer(args.work)
    filler = json.loads((args.work / "filler.json").read_text())["held_out"]
    rows: dict[str, list[np.ndarray]] = {}
    for kind in ("arithmetic", "needle", "tools", "chat"):
        random, make = Random(f"report:{kind}"), generator(kind, filler, 1500)
        items = [make(random, evaluation=True) for _ in range(CONVERSATIONS)]
        parts = [render(item["messages"], item.get("tools")) for item in items]
        rows[kind] = [tokens for tokens, _ in encode_parts(tokenizer, parts)]
    for kind in ("python", "docs"):
        stream = Streams(args.work)[f"held_out.{kind}"]
        count = min(TEXT_ROWS, len(stream) // TEXT_TOKENS)
        rows[kind] = list(stream[: count * TEXT_TOKENS].reshape(count, TEXT_TOKENS))
    measured: list[Measurement] = []
    total = torch.zeros(shape.layers - shape.dense_layers + 1, shape.experts)
    for kind, found in rows.items():
        loads, acceptances, bits = torch.zeros_like(total), [], []
        for tokens in found:
            choices, drafts, losses, load = _row(model, tokens)
            loads += load
            acceptances.append(mtp_acceptance(choices, drafts))
            bits.append(bits_per_byte(losses, len(tokenizer.decode(tokens[1:].tolist()).encode())))
        total += loads
        ranked = loads.sort(-1, descending=True)[0] / loads.sum(-1, keepdim=True)
        measured += [
            measurement(
                f"routings of the top {share:.0%} of experts, {kind}",
                "fraction, by layer",
                ranked[:, : round(share * shape.experts)].sum(1).tolist(),
            )
            for share in SHARES
        ]
        if kind in ("python", "docs"):
            measured.append(measurement(f"mtp k=1 acceptance, {kind}", "fraction", acceptances))
            measured.append(measurement(f"bits per byte, {kind}", "bits", bits))
    unused = (total == 0).sum(1).tolist()
    measured.append(measurement("experts that no text used", "experts, by layer", unused))
    measured.append(measurement("bits per byte of a 5-gram model, python", "bits", [args.ngram]))
    result = run_result(
        "tinymoe",
        started,
        measured,
        notes=(
            "plain torch on the checkpoint's own values; layers in order, the MTP layer last",
            "a draft counts as accepted if it is the model's own first choice (greedy), the text "
            "being given",
        ),
    )
    write_result(args.result, result, force=True)
    for found in measured:
        print(f"{found.name}: {found.median:.4f} ({found.min:.4f} to {found.max:.4f})")


if __name__ == "__main__":
    main()
