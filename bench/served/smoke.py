"""Starts engines of every kind once and says which started, which failed, and if answers repeat.

    PYTHONPATH=bench python -m served.smoke --wave tinymoe,glm-skewed --wave kimi --out FOLDER

The engines of a wave live beside each other. Each serves the same prompts twice; answers are
compared with its own and with those of the engine that must give the same bits.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from served import checkpoints
from served.fleet import Engine, EngineError, Spec, fleet
from served.settings import GATE_ALWAYS, read_experts
from served.tasks import random_prompts

__all__ = ["main", "specs"]

LENGTHS = (17, 40, 100, 250)
TOKENS = 24

SAME_BITS = {"pool": "w2", "arena": "w2", "gate": "fp4"}
"""Kinds of engines whose every logit must be that of another kind."""

SAME_TOKENS = {"compiled": "w2", "spawned": "w2", "fp4": "stock"}
"""Kinds that run the same model with other kernels: the share of equal tokens is shown."""


SPAWNED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
"""An engine core in a process of its own, which must find the plugin by itself."""


def specs(model: Path, name: str, scratch: Path) -> list[Spec]:
    """Return the engines that are tried of one model."""
    experts = read_experts(model)
    half = {**experts.pool(0.5), "host_store": "pinned"}
    arena = {**experts.pool(0.5), **experts.arena(0.5), "packs": str(scratch / f"packs-{name}")}
    gate = {**half, **experts.fine(0.5), **GATE_ALWAYS}
    kinds: dict[str, dict[str, Any]] = {
        "stock": {},
        "w2": {"moet": {}},
        "fp4": {"moet": {"experts": "fp4"}},
        "pool": {"moet": half},
        "arena": {"moet": arena},
        "gate": {"moet": gate},
        "compiled": {"moet": {}, "compiled": True},
        "spawned": {"moet": {}, "environment": SPAWNED},
    }
    common = checkpoints.environment()
    return [
        Spec(
            name=f"{name}.{kind}",
            model=str(model),
            hashed=True,
            moet=settings.get("moet"),
            compiled=settings.get("compiled", False),
            environment={**common, **settings.get("environment", {})},
        )
        for kind, settings in kinds.items()
    ]


def try_engine(engine: Engine, prompts: list[list[int]], seconds: float) -> dict[str, Any]:
    """Serve the prompts twice, one and four at a time; check the pool."""
    found: dict[str, Any] = {"ready": engine.ready, "error": engine.error}
    try:
        for streams in (1, 4):
            runs = [
                engine.ask("answer", seconds, prompts=prompts, tokens=TOKENS, streams=streams)
                for _ in range(2)
            ]
            found[str(streams)] = runs[0]
            found[f"repeats {streams}"] = runs[0] == runs[1]
        found["counts"] = engine.ask("check", seconds)
    except EngineError as error:
        found["error"] = str(error)
    if found["error"]:
        found["log"] = engine.tail()
    return found


def compare(results: dict[str, Any], model: str) -> dict[str, str]:
    """Compare what must be alike; return a word for each pair."""
    found = {}
    for kind, other in {**SAME_BITS, **SAME_TOKENS}.items():
        one, two = (results.get(f"{model}.{part}", {}) for part in (kind, other))
        for streams in ("1", "4"):
            if streams not in one or streams not in two:
                continue
            pairs = [
                a == b
                for left, right in zip(one[streams]["tokens"], two[streams]["tokens"], strict=True)
                for a, b in zip(left, right, strict=True)
            ]
            word = f"{sum(pairs)} of {len(pairs)} tokens"
            if kind in SAME_BITS:
                same = one[streams] == two[streams]
                word = "every logit" if same else f"DIFFERENT, {word}"
            found[f"{model}.{kind} = {other}, {streams} streams"] = word
    return found


def main() -> None:
    """Run the waves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wave", action="append", required=True, help="models, by commas")
    parser.add_argument("--kinds", default="", help="only these kinds of engines, by commas")
    parser.add_argument("--skip", default="", help="names of engines, by commas")
    parser.add_argument("--root", type=Path, required=True, help="where checkpoints are")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start-seconds", type=float, default=240.0)
    parser.add_argument("--task-seconds", type=float, default=120.0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for wave in args.wave:
        began = time.monotonic()
        models = {name: checkpoints.folder(args.root, name) for name in wave.split(",")}
        print(f"checkpoints of {wave}: {time.monotonic() - began:.0f} s", flush=True)
        wanted = [
            spec
            for name, model in models.items()
            for spec in specs(model, name, args.root)
            if not args.kinds or spec.name.rpartition(".")[2] in args.kinds.split(",")
            if spec.name not in args.skip.split(",")
        ]
        with fleet(wanted, args.out / "logs", args.start_seconds) as engines:
            for name, engine in engines.items():
                model = models[name.rpartition(".")[0]]
                prompts = [
                    random_prompts(checkpoints.vocabulary(model), 1, length, 0)[0]
                    for length in LENGTHS
                ]
                results[name] = found = try_engine(engine, prompts, args.task_seconds)
                state = found["error"] or {k: v for k, v in found.items() if "repeats" in k}
                print(f"{name}: {state} {found['ready']} {found.get('counts', '')}", flush=True)
                (args.out / "smoke.json").write_text(json.dumps(results, indent=1))
        for name in models:
            for pair, word in compare(results, name).items():
                print(f"{pair}: {word}", flush=True)
    for name, found in results.items():
        if found["error"]:
            print(f"\n===== {name}: {found['error']}\n{found['log']}", flush=True)


if __name__ == "__main__":
    main()
