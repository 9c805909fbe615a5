"""How many drafts of TinyMoE's MTP layer are accepted, served and in the training code.

    PYTHONPATH=bench python -m speculative.acceptance --result FILE

Native is vLLM's own experts on a bf16 copy with the checkpoint's values; w2 has 2-bit experts in
the main stack and the checkpoint's own in the drafter.
"""

import argparse
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tinymoe.evaluate import mtp_acceptance
from tinymoe.model import TinyMoe
from tinymoe.report import read_checkpoint
from tinymoe.shape import Shape
from tokenizers import Tokenizer

from moet_cli.bench import run_result
from moet_core.results import Measurement, measurement, write_result
from moet_vllm import tinymoe
from moet_vllm.native import write_bf16_copy
from speculative.engine import Answer, Answers, Job, run

BUDGET = 2304  # more than the longest text, so that every prompt is one step
PROMPT, TOKENS, DRAFTS = 64, 128, (1, 2, 3)
SINGLE = 6  # prompts that are also asked one at a time


def texts() -> list[list[int]]:
    """Return the held-out Python texts as token ids: 24 of about 256, 6 of 2040."""
    tokenizer = Tokenizer.from_file(str(tinymoe.CHECKPOINT / "tokenizer.json"))
    found = [text.text for text in tinymoe.held_out().texts if text.kind == "python"]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in found]


@torch.no_grad()
def trained_choices(model: TinyMoe, tokens: list[int]) -> tuple[list[int], list[int]]:
    """Return the model's choice after each token, and the draft for the token after that."""
    hidden, drafted, _ = model(torch.tensor([tokens]))
    choices, drafts = (model.logits(x).float().argmax(-1).tolist() for x in (hidden, drafted))
    return choices, drafts


def on_given_text(choices: list[int], drafts: list[int]) -> float:
    """Return the share of drafts that the model would choose too, the text being given.

    The last two drafts of a row mean nothing in the training code; they are left out.
    """
    return mtp_acceptance(torch.tensor([choices[:-1]]), torch.tensor([drafts]))


def walked(model: TinyMoe, answers: list[Answer]) -> tuple[int, int]:
    """Return verified and accepted drafts of k = 1 for answers, as an engine meets them.

    A step with an accepted draft yields two tokens, and the next draft is for the one after.
    """
    steps = accepted = 0
    for answer in answers:
        text = answer.prompt + answer.tokens
        _, drafts = trained_choices(model, text)
        known = len(answer.prompt)  # the last token that is known, sampled by the prefill
        while known + 1 < len(text):
            right = drafts[known - 1] == text[known + 1]
            steps, accepted = steps + 1, accepted + right
            known += 1 + right
    return steps, accepted


def _served(name: str, found: Answers, drafts: int) -> Iterator[Measurement]:
    for position, accepted in enumerate(found.accepted, 1):
        what = f"accepted of drafts: k={drafts} position {position}, {name}"
        yield measurement(what, "fraction", [accepted / found.steps])
    if drafts:
        length = 1 + sum(found.accepted) / found.steps
        yield measurement(f"tokens a step: k={drafts}, {name}", "tokens", [length])
    whole = found.seconds[: len(found.answers) // 8]
    rates = [8 * TOKENS / seconds for seconds in whole]
    yield measurement(f"decode of 8: k={drafts}, {name}", "tokens/s", rates)


def measure(model: str, moet: dict[str, Any], name: str) -> tuple[list[Measurement], Any]:
    """Serve one kind of experts with all numbers of drafts."""
    measured: list[Measurement] = []
    given = texts()
    prompts = [ids[:PROMPT] for ids in given]
    answers: list[Answer] = []
    for drafts in (0, *DRAFTS):
        job = Job(
            model=model,
            moet=moet,
            drafts=drafts,
            budget=BUDGET,
            prompts=prompts,
            tokens=TOKENS,
            texts=given if drafts == 1 else [],
        )
        found = run(job)
        measured += _served(name, found, drafts)
        if drafts == 1:
            answers = found.answers
            rates = [on_given_text(*pair) for pair in zip(found.choices, found.drafts, strict=True)]
            measured.append(measurement(f"accepted on given text: vLLM, {name}", "fraction", rates))
        single = run(
            Job(
                model=model,
                moet=moet,
                drafts=drafts,
                budget=BUDGET,
                prompts=prompts[:SINGLE],
                tokens=TOKENS,
                streams=1,
            )
        )
        one = [TOKENS / seconds for seconds in single.seconds]
        measured.append(measurement(f"decode of 1: k={drafts}, {name}", "tokens/s", one))
    return measured, answers


def main() -> None:
    """Write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    started = datetime.now(UTC)
    with tempfile.TemporaryDirectory() as folder:
        copy = write_bf16_copy(tinymoe.CHECKPOINT, Path(folder) / "native")
        trained = read_checkpoint(copy, Shape())
        native, answers = measure(str(copy), {"experts": "native"}, "native")
    w2, _ = measure(str(tinymoe.CHECKPOINT), {}, "w2")
    rates = [on_given_text(*trained_choices(trained, text)) for text in texts()]
    steps, accepted = walked(trained, answers)
    measured = [
        measurement("accepted on given text: training code, native", "fraction", rates),
        measurement(
            "accepted of drafts: k=1 position 1 by the training code, native",
            "fraction",
            [accepted / steps],
        ),
        *native,
        *w2,
    ]
    for found in measured:
        print(f"{found.name}: {found.median:.4f}, mean {np.mean(found.samples):.4f}")
    write_result(
        args.result,
        run_result(
            "speculative",
            started,
            measured,
            notes=(
                "TinyMoE, bfloat16, greedy, one thread, enforce_eager; cores shared with other "
                "work",
                f"on given text: 24 held-out Python texts of 256 tokens and 6 of 2040, a sample "
                f"each; of drafts: {TOKENS} tokens after the first {PROMPT} of each text, 8 "
                "requests at a time",
                "by the training code: its drafts for vLLM's answers, met as an engine meets them",
                "decode: generated tokens over the time, prefill included, of 8 requests at a "
                f"time, three times; of 1: the first {SINGLE} prompts, one at a time",
            ),
        ),
        force=True,
    )


if __name__ == "__main__":
    main()
