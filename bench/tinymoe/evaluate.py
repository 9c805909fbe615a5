"""What a model can do, on held-out data, by teacher forcing: one forward pass a set.

A greedy answer is right exactly if every token of it is the model's first choice given the right
tokens before it, so that exact match needs no decoding.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from tinymoe.model import TinyMoe

__all__ = ["HeldOut", "bits_per_byte", "evaluate", "exact_match", "mtp_acceptance", "routing"]

SHARES = (0.1, 0.2, 0.5)


class HeldOut(NamedTuple):
    """Rows of one kind: tokens `[B, L]`; the answers' mask, or None for text; bytes of the text."""

    tokens: np.ndarray
    answers: np.ndarray | None
    text_bytes: int = 0


@torch.no_grad()
def _run(
    model: TinyMoe, tokens: np.ndarray, experts: str, budget: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return loss and first choice at each position `[B, L - 1]`, the drafts, and the loads."""
    device = model.lm_head.weight.device
    rows = max(1, budget // tokens.shape[1])
    losses, choices, drafts, loads = [], [], [], []
    for start in range(0, len(tokens), rows):
        part = tokens[start : start + rows]
        padding = rows - len(part)  # a constant shape: one compilation, also for a last part
        full = np.concatenate([part, np.zeros((padding, part.shape[1]), part.dtype)])
        batch = torch.from_numpy(full).to(device)
        hidden, drafted, load = model(batch, experts)
        logits = model.logits(hidden).unflatten(0, batch.shape)[: len(part)]
        wanted = batch[: len(part), 1:]
        losses.append(F.cross_entropy(logits[:, :-1].float().mT, wanted, reduction="none"))
        choices.append(logits.argmax(-1)[:, :-1])
        drafts.append(model.logits(drafted).unflatten(0, batch.shape)[: len(part)].argmax(-1))
        loads.append(load)
    return torch.cat(losses), torch.cat(choices), torch.cat(drafts), torch.stack(loads).sum(0)


def exact_match(choices: Tensor, tokens: np.ndarray, answers: np.ndarray) -> float:
    """Return the share of rows whose answers are all chosen right."""
    wanted = torch.from_numpy(tokens[:, 1:]).to(choices.device)
    counts = torch.from_numpy(answers[:, 1:]).to(choices.device)
    return ((choices == wanted) | ~counts).all(1).float().mean().item()


def bits_per_byte(losses: Tensor, text_bytes: int) -> float:
    """Return the code length of the rows' text: nats summed, as bits, over its bytes."""
    return losses.double().sum().item() / math.log(2) / text_bytes


def mtp_acceptance(choices: Tensor, drafts: Tensor) -> float:
    """Return how often the draft for token i + 2 is what the model itself would choose there."""
    return (drafts[:, : choices.shape[1] - 1] == choices[:, 1:]).float().mean().item()


def routing(loads: Tensor) -> dict[str, object]:
    """Return the share of routings that the most used experts of each layer serve.

    Args:
        loads: `[moe layers, E]`, tokens that each expert served.
    """
    ranked = loads.sort(-1, descending=True)[0] / loads.sum(-1, keepdim=True)
    experts = loads.shape[1]
    shares = {
        f"top_{round(100 * share)}_percent": [
            round(layer[: max(1, round(share * experts))].sum().item(), 4) for layer in ranked
        ]
        for share in SHARES
    }
    return {**shares, "unused": int((loads == 0).sum().item())}


def evaluate(
    model: TinyMoe, sets: dict[str, HeldOut], experts: str, budget: int
) -> dict[str, object]:
    """Measure all sets; skills as fractions, text as bits per byte, drafts, routing per kind."""
    model.eval()
    found: dict[str, object] = {}
    used: dict[str, object] = {}
    for name, held_out in sets.items():
        losses, choices, drafts, loads = _run(model, held_out.tokens, experts, budget)
        used[name] = routing(loads)
        if held_out.answers is not None:
            found[name] = exact_match(choices, held_out.tokens, held_out.answers)
        else:
            found[f"bits_per_byte.{name}"] = bits_per_byte(losses, held_out.text_bytes)
            found[f"mtp_acceptance.{name}"] = mtp_acceptance(choices, drafts)
    model.train()
    return {**found, "routing": used}
