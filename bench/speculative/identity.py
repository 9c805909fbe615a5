"""Compares greedy answers with and without drafts, token for token and logit for logit.

    PYTHONPATH=bench python -m speculative.identity --result FILE

Eight prompts of 3 to 128 tokens get 64 tokens each (32 with a gate); then, prefix caching being on,
each prompt is asked again with three quarters of its answer behind it. Without drafts, and with
one, two and three; all experts in place, over pools, and with a fine tier and a gate at both of its
ends; prompts whole, and in pieces of 48 tokens. Native is vLLM's own experts on a bf16 copy with
the checkpoint's values.
"""

import argparse
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from moet_cli.bench import run_result
from moet_core.results import Measurement, measurement, write_result
from moet_vllm import tinymoe
from moet_vllm.native import write_bf16_copy
from speculative.engine import Answer, Answers, Job, run

LENGTHS = (3, 9, 17, 33, 40, 64, 100, 128)
WHOLE, PIECES = 2304, 48
DRAFTS = (1, 2, 3)
ROW = 8192 / 2**30  # GiB of an expert of TinyMoE
FINE_ROW = 16384 / 2**30  # GiB of one at FP4


class Layout(msgspec.Struct, frozen=True):
    """How TinyMoE is served, and whether drafts may change nothing.

    Attributes:
        moet: the plugin's settings.
        budget: most tokens in one step.
        streams: requests at a time.
        tokens: length of an answer.
        exact: drafts may change no token. Between the ends of a gate they may: which rows share a
            step decides whether it fires, and drafts are such rows.
    """

    moet: dict[str, Any]
    budget: int = WHOLE
    streams: int = 8
    tokens: int = 64
    exact: bool = True


HALF = {"pool": 256 * ROW, "report_seconds": 0}
# Two requests: their steps are few enough rows to be repaired, but for those of k=3.
GATE = {**HALF, "pool": 384 * ROW, "fine": 128 * FINE_ROW, "gate": "max_prob", "gate_passes": 0}
ALWAYS, NEVER = {**GATE, "tau": 1.0}, {**GATE, "tau": 0.0, "prompts": "base"}
LAYOUTS = {
    "native": Layout({"experts": "native"}),
    "all resident": Layout({}),
    "all resident, in pieces": Layout({}, PIECES),
    "half in the pool": Layout(HALF),
    "half in the pool, in pieces": Layout(HALF, PIECES),
    "an eighth in the pool": Layout({**HALF, "pool": 64 * ROW}),
    "gate, tau 1": Layout(ALWAYS, streams=2, tokens=32),
    "gate, tau 1, in pieces": Layout(ALWAYS, PIECES, tokens=32),
    "gate, tau 0": Layout(NEVER, streams=2, tokens=32),
    "gate, tau 0, in pieces": Layout(NEVER, PIECES, tokens=32),
    "gate, tau 0.6": Layout({**GATE, "tau": 0.6}, streams=2, tokens=32, exact=False),
}

NONE_DIFFERS = "no answer differs where drafts may change nothing"


class Difference(msgspec.Struct, frozen=True):
    """Where two answers part, and by how much the first one's token was ahead there, in nats."""

    answer: int
    position: int
    nats: float


def prompts() -> list[list[int]]:
    """Return the beginnings of eight held-out Python texts, as token ids."""
    tokenizer = Tokenizer.from_file(str(tinymoe.CHECKPOINT / "tokenizer.json"))
    texts = [text.text for text in tinymoe.held_out().texts if text.kind == "python"]
    encoded = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
    return [ids[:length] for ids, length in zip(encoded, LENGTHS, strict=False)]


def first_difference(number: int, wanted: Answer, got: Answer) -> Difference | None:
    """Return where an answer leaves the wanted one."""
    for position, (token, other) in enumerate(zip(wanted.tokens, got.tokens, strict=True)):
        if token != other:
            best = wanted.logprobs[position]
            lead = best[str(token)] - best.get(str(other), float("-inf"))
            return Difference(number, position, lead)
    return None


def compare(name: str, wanted: Answers, got: Answers) -> tuple[list[Measurement], list[Difference]]:
    """Compare all answers; log probabilities up to where an answer leaves the wanted one.

    Prompts of the second turn hold first answers, so that they are alike where those are.
    """
    parted = [
        first_difference(number, a, b)
        for number, (a, b) in enumerate(zip(wanted.answers, got.answers, strict=True))
        if a.prompt == b.prompt
    ]
    apart = [
        abs(best[str(token)] - other[str(token)])
        for a, b in zip(wanted.answers, got.answers, strict=True)
        for token, other_token, best, other in zip(
            a.tokens, b.tokens, a.logprobs, b.logprobs, strict=True
        )
        if a.prompt == b.prompt and token == other_token
    ]
    figures = {
        "answers compared": float(len(parted)),
        "answers that differ": float(sum(found is not None for found in parted)),
        "tokens equal": float(len(apart)),
        "largest difference in log probability": max(apart),
    }
    units = ("answers", "answers", "tokens", "nats")
    measured = [
        measurement(f"{figure}: {name}", unit, [value])
        for (figure, value), unit in zip(figures.items(), units, strict=True)
    ]
    return measured, [found for found in parted if found is not None]


def shares(counts: dict[str, float]) -> dict[str, float]:
    """Return which share of an engine's steps were repaired and streamed, and fired the gate."""
    return {
        "repaired": counts["repaired"] / counts["steps"],
        "streamed": counts["streamed"] / counts["steps"],
        "fired": counts["fires"] / counts["steps"],
    }


def measure(layout: str, native: Path) -> tuple[list[Measurement], list[str]]:
    """Serve one layout with all numbers of drafts; return figures, and what differs in words."""
    chosen = LAYOUTS[layout]
    is_native = chosen.moet.get("experts") == "native"
    model = native if is_native else tinymoe.CHECKPOINT
    found = {
        drafts: run(
            Job(
                model=str(model),
                moet=chosen.moet,
                drafts=drafts,
                budget=chosen.budget,
                prompts=prompts(),
                turns=2,
                streams=chosen.streams,
                tokens=chosen.tokens,
            )
        )
        for drafts in (0, *DRAFTS)
    }
    measured: list[Measurement] = []
    parted: list[str] = []
    for drafts in DRAFTS:
        name = f"{layout}, k={drafts}"
        figures, differences = compare(name, found[0], found[drafts])
        cached = found[drafts].cached
        measured += [*figures, measurement(f"prompt tokens cached: {name}", "tokens", [cached])]
        parted += [
            f"{name}: answer {each.answer} parts at position {each.position}, where the wanted "
            f"token led by {each.nats:.4f} nat"
            for each in differences
        ]
        if not chosen.exact:
            parted.clear()
        print(name, *(f"{each.name.split(':')[0]} {each.median:g};" for each in figures))
    if "gate" in chosen.moet:
        measured += [
            measurement(f"{figure}: {layout}, k={drafts}", "of the steps", [value])
            for drafts, answers in found.items()
            for figure, value in shares(answers.counts).items()
        ]
    return measured, parted


def main() -> None:
    """Run all layouts from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--layouts", type=lambda text: text.split(";"), default=list(LAYOUTS))
    args = parser.parse_args()
    started = datetime.now(UTC)
    measured: list[Measurement] = []
    parted: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        native = write_bf16_copy(tinymoe.CHECKPOINT, Path(folder) / "native")
        for layout in args.layouts:
            figures, differences = measure(layout, native)
            measured += figures
            parted += differences
    write_result(
        args.result,
        run_result(
            "speculative-identity",
            started,
            measured,
            notes=(
                "TinyMoE, experts=w2 unless native, bfloat16, greedy, prefix caching, one thread; "
                "8 prompts, then the same with three quarters of their answers behind",
                "gate: max_prob, fine tier of 25 %, no budget, as many passes as it takes",
                *(parted or [NONE_DIFFERS]),
            ),
        ),
        force=True,
    )
    print("\n".join(parted) or NONE_DIFFERS)
    sys.exit(bool(parted))


if __name__ == "__main__":
    main()
