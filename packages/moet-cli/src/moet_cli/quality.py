"""`moet bench quality`: what a configuration does to a trained model, on held-out data.

Every question is asked of a served model. What the checkpoint says at its own precision is the
reference; its replies are kept in the cache folder, so that one run serves one configuration.
"""

import hashlib
import os
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from moet_cli.bench import Target, finish, result_path, run_result
from moet_cli.checks import run_checks
from moet_cli.launch import command_line, make_launch, wait_ready
from moet_cli.machine import installed_vllm
from moet_cli.model import fetch_model
from moet_cli.options import Target as Reader
from moet_cli.options import parse_setting
from moet_cli.output import Output
from moet_cli.plan import Plan, resolve
from moet_cli.quality_client import CANDIDATES, Collected, Scored, collect
from moet_cli.supervise import Server
from moet_core.quality import bits_per_byte, coarse_kl, loops
from moet_core.results import Measurement, measurement
from moet_vllm.tinymoe import HeldOut, held_out

__all__ = ["bench_quality", "compare", "native_folder", "serving_settings"]

CONTEXTS = ("short", "2k")
FORMAT = 1  # of the cached replies


def serving_settings(settings: Sequence[str]) -> list[str]:
    """Return what every measured server needs, and the user's settings after it."""
    return [
        "port=0",
        f"max_logprobs={CANDIDATES}",
        "enable_auto_tool_choice=true",
        "tool_call_parser=moet_glm47",
        *settings,
    ]


def bench_quality(
    output: Output, name: str, settings: Sequence[str], reference: str | None, target: Target
) -> None:
    """Measure one configuration against the checkpoint at its own precision.

    Args:
        output: where to show it.
        name: recipe or model.
        settings: `key=value` of `--set`.
        reference: the model to compare with; None for the configuration's own.
        target: the result file.

    Raises:
        MoetError: a server failed, or the result file exists and may not be replaced.
    """
    started = datetime.now(UTC)
    settings = serving_settings(settings)
    plan = resolve(name, settings)
    path = result_path(target, f"{Path(name).stem}-quality", started)
    questions = held_out()
    model = reference or plan["model"]
    native = resolve(
        name, [*_of_others(settings), "experts=native", f"model={native_folder(model)}"]
    )
    cached = _cache(fetch_model(model), questions)
    itself = plan["experts"] == "native" and reference is None
    if itself or not cached.exists():
        output.say("asking the checkpoint at its own precision")
        replies, server = _served(output, native, questions)
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.write_bytes(msgspec.msgpack.encode(replies))
    wanted = msgspec.msgpack.decode(cached.read_bytes(), type=Collected)
    found = wanted
    if not itself:
        output.say(f"asking {plan['model']} with experts: {plan['experts']}")
        found, server = _served(output, plan, questions)
    measured = compare(found, wanted)
    notes = _notes(questions, plan)
    result = run_result(
        "quality", started, measured, recipe=plan.recipe, server=server, notes=notes
    )
    finish(output, path, result, target.force)


def compare(found: Collected, reference: Collected) -> list[Measurement]:
    """Return all figures of a configuration; fractions, nats, bits and tokens."""
    measured = []
    skills: dict[str, list[bool]] = {}
    for answer in found.answers:
        skills.setdefault(answer.skill, []).append(answer.right)
    for skill, right in skills.items():
        measured.append(measurement(f"skills.{skill}", "fraction", [statistics.mean(right)]))
    pairs = list(zip(found.texts, reference.texts, strict=True))
    for context in CONTEXTS:
        chosen = [pair for pair in pairs if pair[0].context == context]
        measured += _text_figures(f".{context}", chosen)
    measured += _text_figures("", pairs)
    tokens = [answer.tokens for answer in found.answers]
    native_tokens = [answer.tokens for answer in reference.answers]
    inflation = sum(tokens) / sum(native_tokens)
    looping = statistics.mean(loops(answer.text) for answer in found.answers)
    return [
        *measured,
        measurement("completion_tokens", "tokens per reply", [statistics.mean(tokens)]),
        measurement("inflation", "times native", [inflation]),
        measurement("loop_rate", "fraction", [looping]),
    ]


def _text_figures(suffix: str, pairs: Sequence[tuple[Scored, Scored]]) -> list[Measurement]:
    """Return KL, agreement and bits per byte over the tokens of all given texts."""
    divergences, agreements, actual, size = [], [], [], 0
    for text, native in pairs:
        ids, native_ids = np.asarray(text.ids), np.asarray(native.ids)
        logprobs, native_logprobs = np.asarray(text.logprobs), np.asarray(native.logprobs)
        divergences.append(coarse_kl(native_ids, native_logprobs, ids, logprobs))
        agreements.append(native_ids[:, 0] == ids[:, 0])
        actual.append(np.asarray(text.actual))
        size += text.text_bytes
    kl, agreement = np.concatenate(divergences).mean(), np.concatenate(agreements).mean()
    return [
        measurement(f"kl{suffix}", "nats per token", [float(kl)]),
        measurement(f"top1_agreement{suffix}", "fraction", [float(agreement)]),
        measurement(
            f"bits_per_byte{suffix}", "bits", [bits_per_byte(np.concatenate(actual), size)]
        ),
    ]


def _served(output: Output, plan: Plan, questions: HeldOut) -> tuple[Collected, tuple[str, ...]]:
    """Serve a plan, ask everything, stop; return the replies and the server's command line."""
    run_checks(plan)
    launch = make_launch(plan, output)
    with Server(launch) as server:
        wait_ready(server, plan)
        found = server.watch(lambda: collect(launch.url, questions, output.say))
    return found, command_line(launch.command, launch.environment)


def _of_others(settings: Sequence[str]) -> list[str]:
    """Leave out what only 2-bit experts take: the server at the checkpoint's precision has none."""
    return [s for s in settings if parse_setting(s)[0].target is not Reader.MOET]


def native_folder(model: str) -> str:
    """Return what serves a model at its own precision: on a CPU, a bf16 copy of NVFP4 experts."""
    vllm = installed_vllm()
    folder = fetch_model(model)
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    algorithm = config.get("quantization_config", {}).get("quant_algo")
    if vllm is None or not vllm.cpu or algorithm != "NVFP4":
        return str(folder)
    from moet_vllm.native import write_bf16_copy  # imports torch

    return str(write_bf16_copy(folder, _cache_folder() / f"bf16-{_digest(folder)}"))


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _cache(folder: Path, questions: HeldOut) -> Path:
    """Return where a model's replies are kept: by model, questions and format."""
    asked = hashlib.sha256(msgspec.json.encode(questions) + bytes([FORMAT, CANDIDATES]))
    return _cache_folder() / f"quality-{_digest(folder)}-{asked.hexdigest()[:16]}.msgpack"


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moet"


def _notes(questions: HeldOut, plan: Plan) -> tuple[str, ...]:
    return (
        f"experts: {plan['experts']}, zeros: {plan['zeros']}",
        f"{len(questions.cases)} questions, {len(questions.texts)} texts; greedy",
        f"kl tells the {CANDIDATES} likeliest tokens of both models apart and takes the rest as "
        "one outcome: a lower bound",
        "the reference is the checkpoint at its own precision (on a CPU: its experts' NVFP4 "
        "values as bf16, which holds them exactly)",
    )
