"""Asks TinyMoE's questions of servers with and without a gate, one request at a time.

    PYTHONPATH=bench python bench/gate/skills.py bench/results/gate-skills.json [--questions 4]

`moet bench quality` asks eight questions at a time and scores texts as prompts: one of eight rows
is uncertain more often than one alone, and a step that holds tokens of a prompt is not gated. Here
every decoded token is a step of its own. Each configuration is a server of its own, whose pools
start cold.
"""

import argparse
import math
import os
import random
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from moet_cli.bench import run_result
from moet_cli.checks import run_checks
from moet_cli.launch import running
from moet_cli.metrics import fetch_page
from moet_cli.output import Output
from moet_cli.plan import resolve
from moet_cli.quality import native_folder, serving_settings
from moet_cli.quality_client import Collected, collect
from moet_core.quality import loops
from moet_core.results import Measurement, measurement, write_result
from moet_vllm.tinymoe import Case, HeldOut, held_out

# The matrices are small: two threads mostly wait for each other.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")

ASKED = {"arithmetic": 60, "needle": 20, "tool_calls": 120, "chat": 60}
FINE_ROW, BASE_EXPERTS = 16384, 512
SHARES = (0.1, 0.25, 0.5)
GATE_SHARE = 0.25
TAUS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
DEVIATIONS = 1.96
"""Standard deviations of an interval of 95 %."""

COUNTED = ("moet_steps", "moet_passes", "moet_gate_checked_steps", "moet_gate_fires")
COUNTED += ("moet_gate_promoted_experts", "moet_fine_promoted_experts")


def configurations() -> dict[str, list[str]]:
    """Return the settings of each configuration, by name; the reference is the first."""
    gate = [f"fine={share(GATE_SHARE)}", "gate=max_prob"]
    found = {"native": ["experts=native", f"model={native_folder('tinymoe')}"], "W2": []}
    found["W2, prompts fine"] = [*gate, "tau=0"]
    for part in SHARES:
        found[f"fine tier of {part:.0%} by use"] = [f"fine={share(part)}"]
    for tau in TAUS:
        found[f"gate {tau}"] = [*gate, f"tau={tau}"]
    return found


def share(part: float) -> float:
    """Return the GiB of a fine tier for a share of the experts."""
    return part * BASE_EXPERTS * FINE_ROW / 2**30


def questions(most: int | None) -> HeldOut:
    """Return `ASKED` of each skill, or at most `most`, evenly spread over all of them.

    They come in random order: a conversation warms the fine tier for what is like it.
    """
    chosen: list[Case] = []
    for skill, count in ASKED.items():
        cases = [case for case in held_out().cases if case.skill == skill]
        wanted = count if most is None else min(count, most)
        chosen += [cases[number * len(cases) // wanted] for number in range(wanted)]
    random.Random(0).shuffle(chosen)  # noqa: S311 (hides nothing)
    return HeldOut(cases=chosen, texts=[])


def ask(settings: Sequence[str], asked: HeldOut) -> tuple[Collected, dict[str, float]]:
    """Serve one configuration and ask everything; return the replies and the server's counters."""
    output = Output()
    plan = resolve("demo", serving_settings([*settings, "max_num_seqs=1"]))
    run_checks(plan)
    with running(plan, output) as server:
        url = server.launch.url
        names = [f"{name}_total" for name in COUNTED]
        before = counters(url, names)
        found = server.watch(lambda: collect(url, asked, output.say, streams=1))
        after = counters(url, names)
    return found, {name.removesuffix("_total"): after[name] - before[name] for name in after}


def counters(url: str, names: Sequence[str]) -> dict[str, float]:
    """Read those of the counters that a server has."""
    page = fetch_page(url, [*names, "vllm:num_requests_running"])
    return {name: sum(page.values[name].values()) for name in names if name in page.values}


def interval(right: Sequence[bool]) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share, after Wilson (1927)."""
    n, z = len(right), DEVIATIONS
    p = statistics.mean(right)
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return middle - half, middle + half


def figures(name: str, found: Collected, native: Collected) -> list[Measurement]:
    """Return what a configuration's replies say, against those of the reference."""
    measured = []
    skills: dict[str, list[bool]] = {}
    for answer in found.answers:
        skills.setdefault(answer.skill, []).append(answer.right)
    skills["all"] = [answer.right for answer in found.answers]
    for skill, right in skills.items():
        measured.append(
            measurement(f"right answers: {name}, {skill}", "fraction", [statistics.mean(right)])
        )
        for end, value in zip(("from", "to"), interval(right), strict=True):
            column = f"95 % intervals: {name}, {skill} {end}"
            measured.append(measurement(column, "fraction", [value]))
    tokens = [answer.tokens for answer in found.answers]
    inflation = sum(tokens) / sum(answer.tokens for answer in native.answers)
    looping = statistics.mean(loops(answer.text) for answer in found.answers)
    same = statistics.mean(
        a.text == b.text for a, b in zip(found.answers, native.answers, strict=True)
    )
    return [
        *measured,
        measurement(f"replies: {name}, tokens against native", "share", [inflation]),
        measurement(f"replies: {name}, word for word native's", "share", [same]),
        measurement(f"replies: {name}, looping", "share", [looping]),
    ]


def work(name: str, counts: dict[str, float]) -> list[Measurement]:
    """Return what a configuration did for its replies; nothing without a fine tier."""
    if not counts:
        return []
    steps = counts["moet_steps"]
    moved = counts.get("moet_gate_promoted_experts", 0) + counts["moet_fine_promoted_experts"]
    found = {"passes a step": counts["moet_passes"] / steps, "fine experts a step": moved / steps}
    if "moet_gate_fires" in counts:
        checked = counts["moet_gate_checked_steps"]
        found["steps that fired"] = counts["moet_gate_fires"] / checked
    return [measurement(f"work: {name}, {what}", "mean", [value]) for what, value in found.items()]


def main() -> None:
    """Ask all configurations; the file is written anew after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--questions", type=int, help="at most so many of each skill")
    parser.add_argument("--only", type=lambda text: text.split(";"), help="names, native first")
    args = parser.parse_args()
    began = datetime.now(UTC)
    asked = questions(args.questions)
    by_skill = ", ".join(
        f"{sum(case.skill == skill for case in asked.cases)} {skill}" for skill in ASKED
    )
    notes = (
        f"questions: {by_skill}; greedy, one at a time; pools cold at the start of each server",
        f"gate: fine tier of {GATE_SHARE:.0%} of the experts, no budget, at most 3 finer passes",
        "right answers: the whole reply is right; intervals after Wilson",
    )
    measured: list[Measurement] = []
    native: Collected | None = None
    for name, settings in configurations().items():
        if args.only and name not in args.only:
            continue
        print(name, file=sys.stderr, flush=True)
        started = datetime.now(UTC)
        found, counts = ask(settings, asked)
        native = native or found
        measured += [*figures(name, found, native), *work(name, counts)]
        seconds = (datetime.now(UTC) - started).total_seconds()
        print(f"{name}: {seconds:.0f} s {counts}", file=sys.stderr, flush=True)
        write_result(args.out, run_result("gate-skills", began, measured, notes=notes), force=True)


if __name__ == "__main__":
    main()
