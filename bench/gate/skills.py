"""Asks TinyMoE's questions with and without a gate, one at a time, and compares the replies.

    PYTHONPATH=bench python bench/gate/skills.py bench/results/gate-skills.json [--questions 3]

`moet bench quality` asks eight questions at a time and scores texts as prompts: one of eight rows
is uncertain more often than one alone, and a step that holds tokens of a prompt is not gated. Here
every decoded token is a step of its own. The reference is vLLM's own experts on a bf16 copy with
the checkpoint's values. Every other configuration starts with cold pools.
"""

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gate.curves import GATE_SHARE, SHARES, engine, share, worker_of

ASKED = {"arithmetic": 20, "needle": 6, "tool_calls": 45, "chat": 30}
TAUS = (0.6, 0.8, 0.9, 0.95, 0.99, 1.0)
MAX_TOKENS = 96
DEVIATIONS = 1.96
"""Standard deviations of an interval of 95 %."""


def configurations(packs: Path) -> dict[str, dict[str, Any]]:
    """Return the plugin's settings of each configuration, by name."""
    base = {"packs": str(packs), "report_seconds": 0}
    gate = base | {"fine": share(GATE_SHARE), "gate": "max_prob"}
    found = {"W2": base, "W2, prompts fine": gate | {"tau": 0.0}}
    for part in SHARES:
        found[f"fine tier of {part:.0%} by use"] = base | {"fine": share(part)}
    for tau in TAUS:
        found[f"gate {tau}"] = gate | {"tau": tau}
    return found


def questions(most: int | None) -> list[Any]:
    """Return `ASKED` of each skill, or at most `most`, evenly spread over all of them.

    They come in random order: what is alike would warm the fine tier for each other.
    """
    from moet_vllm.tinymoe import held_out

    chosen = []
    for skill, count in ASKED.items():
        cases = [case for case in held_out().cases if case.skill == skill]
        wanted = count if most is None else min(count, most)
        chosen += [cases[number * len(cases) // wanted] for number in range(wanted)]
    random.Random(0).shuffle(chosen)  # noqa: S311 (hides nothing)
    return chosen


def ask(llm: Any, recorder: Any, asked: Sequence[Any]) -> list[Any]:
    """Ask one question after the other; return the replies, read as a server would."""
    from vllm import SamplingParams

    from moet_cli.quality_client import Answered, is_right
    from moet_vllm.parsers import Thinking, parse

    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, skip_special_tokens=False)
    found = []
    for case in asked:
        recorder.logits.clear()
        (request,) = llm.chat(case.messages, greedy, tools=case.tools, use_tqdm=False)
        (output,) = request.outputs
        text = output.text
        calls: list[tuple[str, str]] = []
        if case.tools:
            message = parse(text, "glm47", case.tools, thinking=Thinking.OFF)
            calls = [(call.name, call.arguments) for call in message.calls]
            text = json.dumps(calls) if calls else message.content
        right = is_right(case, text, calls)
        found.append(Answered(case.skill, right, text, len(output.token_ids)))
    return found


def interval(right: Sequence[bool]) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share, after Wilson (1927)."""
    n, z = len(right), DEVIATIONS
    p = statistics.mean(right)
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return middle - half, middle + half


def figures(name: str, found: Sequence[Any], native: Sequence[Any]) -> dict[str, tuple[str, float]]:
    """Return what replies say, against those of the reference: unit and value by figure."""
    from moet_core.quality import loops

    skills: dict[str, list[bool]] = {}
    for answer in found:
        skills.setdefault(answer.skill, []).append(answer.right)
    skills["all"] = [answer.right for answer in found]
    measured = {}
    for skill, right in skills.items():
        measured[f"right answers: {name}, {skill}"] = "fraction", statistics.mean(right)
        for end, value in zip(("from", "to"), interval(right), strict=True):
            measured[f"95 % intervals: {name}, {skill} {end}"] = "fraction", value
    inflation = sum(a.tokens for a in found) / sum(a.tokens for a in native)
    same = statistics.mean(a.text == b.text for a, b in zip(found, native, strict=True))
    looping = statistics.mean(loops(answer.text) for answer in found)
    measured[f"replies: {name}, tokens over native's"] = "share", inflation
    measured[f"replies: {name}, same as native's"] = "share", same
    measured[f"replies: {name}, looping"] = "share", looping
    return measured


def work(name: str, resident: Any) -> dict[str, tuple[str, float]]:
    """Return what a configuration did for its replies; prompts count as steps."""
    steps = resident.counts.steps
    found = {"passes": resident.counts.passes / steps}
    if resident.fine is not None:
        found["fine experts promoted"] = resident.fine.tier.promoted / steps
        gate = resident.fine.gate
        if gate is not None:
            found["fine experts promoted"] = gate.counts.promoted / steps
            found["fires"] = gate.counts.fires / gate.counts.checked
            if gate.counts.fires:
                found["fires that changed the token"] = gate.counts.flipped / gate.counts.fires
    return {f"work a step: {name}, {what}": ("mean", value) for what, value in found.items()}


def main() -> None:
    """Ask in all configurations; the file is written anew after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--questions", type=int, help="at most so many of each skill")
    args = parser.parse_args()
    from moet_cli.bench import run_result
    from moet_cli.quality import native_folder
    from moet_core.results import measurement, write_result

    began = datetime.now(UTC)
    asked = questions(args.questions)
    by_skill = ", ".join(f"{sum(case.skill == skill for case in asked)} {skill}" for skill in ASKED)
    notes = (
        f"questions: {by_skill}; greedy, one at a time, at most {MAX_TOKENS} tokens",
        f"gate: fine tier of {GATE_SHARE:.0%} of the experts, no budget, at most 3 finer passes",
        "right: the whole reply is; intervals after Wilson",
    )
    measured: dict[str, tuple[str, float]] = {}

    def note(found: dict[str, tuple[str, float]]) -> None:
        measured.update(found)
        every = [measurement(name, unit, [value]) for name, (unit, value) in measured.items()]
        write_result(args.out, run_result("gate-skills", began, every, notes=notes), force=True)

    with engine({"experts": "native"}, native_folder("tinymoe")) as (llm, recorder):
        native = ask(llm, recorder, asked)
    note(figures("native", native, native))
    with tempfile.TemporaryDirectory() as folder:
        packs = Path(folder) / "packs"
        first = {"packs": str(packs), "report_seconds": 0, "fine": share(GATE_SHARE)}
        with engine(first) as (llm, recorder):
            for name, settings in configurations(packs).items():
                started = datetime.now(UTC)
                llm.collective_rpc("reopen_pool", args=(settings,))
                found = ask(llm, recorder, asked)
                resident = worker_of(llm).resident
                resident.check_integrity()
                note(figures(name, found, native) | work(name, resident))
                seconds = (datetime.now(UTC) - started).total_seconds()
                right = statistics.mean(answer.right for answer in found)
                print(f"{name}: {right:.3f} right, {seconds:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
