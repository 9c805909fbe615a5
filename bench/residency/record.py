"""Record what TinyMoE routes its held-out texts to, one trace for each kind of text.

    PYTHONPATH=bench python -m residency.record bench/residency/traces

The model is the pure torch one of bench/tinymoe with the shipped checkpoint at its own precision;
its MTP layer is left out. Texts are not generated but read (teacher forcing): the routing of a
token depends on the tokens before it alone, so that each one after the prompt is a decode step.
The same processor gives the same bytes; on another, near ties of the router may fall otherwise.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tinymoe.chat import render
from tinymoe.model import TinyMoe
from tinymoe.report import read_checkpoint
from tinymoe.shape import Shape
from tinymoe.tokenizer import encode_parts, read_tokenizer
from tokenizers import Tokenizer

from moet_core.traces import RoutingTrace, save_trace
from moet_vllm.native import write_bf16_copy
from moet_vllm.tinymoe import CHECKPOINT, Case, HeldOut, held_out

CHUNK = 512
"""Tokens of a prefill step at most."""

TEXT_TOKENS, TEXT_PROMPT = 1024, 128
TEXTS = {"python": 5, "prose": 5}
CONVERSATIONS = {"tool_calls": 60, "arithmetic": 200, "chat": 60}

Request = tuple[np.ndarray, int]
"""Tokens, and how many of them are the prompt."""


def requests(kind: str, tokenizer: Tokenizer, data: HeldOut) -> list[Request]:
    """Return the requests of a kind of text, in the order of the held-out sets."""
    if kind in CONVERSATIONS:
        cases = [case for case in data.cases if case.skill == kind][: CONVERSATIONS[kind]]
        return [_conversation(tokenizer, case) for case in cases]
    if kind == "python":
        texts = [text.text for text in data.texts if text.context == "2k"]
    else:
        # The questions of this skill carry pages of documentation, which training never saw.
        texts = [case.messages[0]["content"] for case in data.cases if case.skill == "needle"]
    found = []
    for text in texts[: TEXTS[kind]]:
        tokens = np.array(tokenizer.encode(text, add_special_tokens=False).ids[:TEXT_TOKENS])
        found.append((tokens, TEXT_PROMPT))
    return found


def _conversation(tokenizer: Tokenizer, case: Case) -> Request:
    last: dict[str, Any] = {"role": "assistant", "content": case.answer}
    if case.call is not None:
        last["tool_calls"] = [{"function": case.call}]
    ((tokens, answers),) = encode_parts(tokenizer, [render([*case.messages, last], case.tools)])
    # The answer is what the assistant says last: after the last token that somebody else wrote.
    return tokens, int(np.flatnonzero(~answers)[-1]) + 1


@torch.no_grad()
def route(model: TinyMoe, tokens: np.ndarray) -> np.ndarray:
    """Return the experts of each token and main-stack layer, ascending: uint16 [T, L, k]."""
    chosen: list[torch.Tensor] = []
    gates = [layer.gate for layer in model.moe_layers[:-1]]
    hooks = [
        gate.register_forward_hook(lambda _m, _x, out: chosen.append(out[1])) for gate in gates
    ]
    try:
        model(torch.from_numpy(tokens.astype(np.int64))[None])
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(chosen, 1).sort(-1)[0].numpy().astype(np.uint16)


def step_lengths(length: int, prompt: int) -> Iterator[tuple[int, bool]]:
    """Yield the tokens of each step of a request, and whether it is prefill.

    The last token of a text is what the last step yields; no step reads it.
    """
    for start in range(0, prompt, CHUNK):
        yield min(CHUNK, prompt - start), True
    for _ in range(prompt, length - 1):
        yield 1, False


def record(model: TinyMoe, found: list[Request]) -> RoutingTrace:
    """Return the trace of serving requests one after the other."""
    chosen, lengths, kinds = [], [], []
    for tokens, prompt in found:
        chosen.append(route(model, tokens)[:-1])
        for length, prefill in step_lengths(len(tokens), prompt):
            lengths.append(length)
            kinds.append(prefill)
    ends = np.cumsum(lengths, dtype=np.int64)
    return RoutingTrace(np.concatenate(chosen), ends, np.array(kinds), model.shape.experts)


def main() -> None:
    """Write the traces."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)  # sums of one order, whatever the machine
    with tempfile.TemporaryDirectory() as folder:
        model = read_checkpoint(write_bf16_copy(CHECKPOINT, Path(folder) / "copy"), Shape())
    tokenizer, data = read_tokenizer(CHECKPOINT), held_out()
    args.out.mkdir(parents=True, exist_ok=True)
    for kind in (*TEXTS, *CONVERSATIONS):
        trace = record(model, requests(kind, tokenizer, data))
        path = args.out / f"{kind}.npz"
        save_trace(path, trace)
        decoded = int(np.count_nonzero(~trace.prefill))
        print(f"{path}: {len(trace.chosen)} tokens, {decoded} decoded, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
