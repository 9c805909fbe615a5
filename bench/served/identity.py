"""Compares every logit of engines with pools, with the fine tier and with the gate, under graphs.

    PYTHONPATH=bench python -m served.identity --model glm-skewed --root FOLDER --out FILE

An engine under CUDA graphs keeps its pool for life: each combination is an engine of its own, all
of them beside each other on one GPU. `--sweep` adds engines without graphs, whose pools are
replaced between runs, for many more combinations.

Prompts longer than the batch of `--chunk` tokens are read in parts by the chunked engines, whose
reference is chunked as well.
"""

import argparse
import itertools
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from moet_cli.bench import run_result
from moet_core.results import Measurement, measurement, write_result
from served import checkpoints
from served.fleet import Engine, EngineError, Spec, fleet
from served.settings import GATE_ALWAYS, Experts, read_experts
from served.tasks import random_prompts

__all__ = ["Case", "cases", "main", "measurements"]

LENGTHS = (17, 40, 100, 250)
TOKENS = 16
STREAMS = (1, 4)
AUTO_MEMORY = {"gpu_memory_utilization": 0.15}
"""What an engine with `pool=auto` may have of a GPU that others share."""

EVEN = {"gate": "max_prob", "tau": 0.0, "prompts": "base"}
"""A gate that never fires, over prompts read with 2-bit experts: plain W2."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, and the one whose bits it must give.

    Attributes:
        name: Of the engine.
        moet: The plugin's settings.
        like: Name of the reference; empty for a reference.
        chunked: Prompts are read in parts.
        hot: Engine whose hot set the pool begins with.
        engine: More arguments of vLLM's LLM.
        after: Engine that writes the packs it reads.
        what: Group of the result's measurements.
    """

    name: str
    moet: dict[str, Any]
    like: str = ""
    chunked: bool = False
    hot: str = ""
    engine: dict[str, Any] = {}
    after: str = ""
    what: str = ""


def cases(experts: Experts, packs: Path) -> list[Case]:
    """Return references and what is compared with them; `half arena` writes the packs."""
    base = {"packs": str(packs)}
    fine = experts.fine(0.5)
    arena = {**base, **experts.arena(0.5)}
    pinned, pack = {"host_store": "pinned"}, {**base, "host_store": "pack"}
    half, least = experts.pool(0.5), experts.pool(0)
    found = [
        Case(name="w2", moet={}),
        Case(name="fp4", moet={"experts": "fp4"}),
        Case(name="w2 chunked", moet={}, chunked=True),
        Case(name="half arena", moet={**half, **arena}, like="w2"),
        Case(name="half pinned", moet={**half, **pinned}, like="w2"),
        Case(name="half pack", moet={**half, **pack}, like="w2"),
        Case(name="least pinned", moet={**least, **pinned}, like="w2"),
        Case(name="least arena", moet={**least, **arena}, like="w2"),
        Case(name="hot arena", moet={**half, **arena}, like="w2", hot="half arena"),
        Case(name="auto", moet={**pinned, "pool": "auto"}, like="w2", engine=AUTO_MEMORY),
        Case(name="all packs", moet={**base, "report_seconds": 0}, like="w2"),
        Case(name="half arena chunked", moet={**half, **arena}, like="w2 chunked", chunked=True),
        Case(name="gate always", moet={**half, **pinned, **fine, **GATE_ALWAYS}, like="fp4"),
        Case(name="gate never", moet={**half, **pinned, **fine, **EVEN}, like="w2"),
    ]
    readers = [case.name for case in found if "packs" in case.moet and case.name != "half arena"]
    return [
        msgspec.structs.replace(
            case,
            after="half arena" if case.name in readers else "",
            what="gate" if "gate" in case.name else "pool",
        )
        for case in found
        if case.name != "auto" or checkpoints.device().type == "cuda"
    ]


def spec_of(case: Case, model: Path, chunk: int) -> Spec:
    """Return the engine of a case."""
    engine = {**case.engine, **({"max_num_batched_tokens": chunk} if case.chunked else {})}
    return Spec(
        name=case.name,
        model=str(model),
        moet=case.moet,
        engine=engine,
        hashed=True,
        environment=checkpoints.environment(),
        after=case.after,
    )


def run_case(
    engine: Engine, prompts: list[list[int]], seconds: float, hot: Engine | None = None
) -> dict[str, Any]:
    """Serve the prompts one and four at a time, cold and then warm; check the pool.

    With `hot`, the pool begins with what that engine's pool holds, and is not cold.
    """
    found: dict[str, Any] = {"error": engine.error, "answers": {}, "ready": engine.ready}
    try:
        if hot is not None:
            engine.ask("preload", seconds, keys=hot.ask("hottest", seconds))
        for streams, state in itertools.product(STREAMS, ("cold", "warm")):
            found["answers"][f"{streams} {state}"] = engine.ask(
                "answer", seconds, prompts=prompts, tokens=TOKENS, streams=streams
            )
        found["counts"] = engine.ask("check", seconds)
    except EngineError as error:
        found["error"] = str(error)
    if found["error"]:
        found["log"] = engine.tail()
    return found


def sweep(
    engine: Engine, experts: Experts, packs: Path, prompts: list[list[int]], until: float
) -> list[dict[str, Any]]:
    """Replace one engine's pool time and again; return its answers for each combination."""
    found = []
    shares = {"least": 0.0, "half": 0.5, "all but one": 1 - 1 / experts.rows}
    stores: dict[str, dict[str, Any]] = {
        "pinned": {"host_store": "pinned"},
        "pack": {"host_store": "pack"},
        "arena": experts.arena(0),
    }
    for (pool, share), (store, settings) in itertools.product(shares.items(), stores.items()):
        moet = {"packs": str(packs), **experts.pool(share), **settings}
        for state in ("cold", "preloaded"):
            if time.monotonic() > until:
                return found
            engine.ask("reopen", moet=moet, forget=state == "cold")
            for streams in STREAMS:
                answer = engine.ask("answer", prompts=prompts, tokens=TOKENS, streams=streams)
                record = {"pool": pool, "store": store, "state": state, "streams": streams}
                found.append({**record, "answer": answer})
            found[-1]["counts"] = engine.ask("check")
            engine.ask("save_heat")
    return found


def measurements(label: str, records: list[dict[str, Any]]) -> list[Measurement]:
    """Sum up comparisons; each record has `what`, `same` and perhaps `counts`."""
    found = []
    for what in sorted({record["what"] for record in records}):
        part = [record for record in records if record["what"] == what]
        counts = [record["counts"] for record in part if record.get("counts")]
        figures = {
            "combinations": len(part),
            "that differ": sum(not record["same"] for record in part),
            **{
                key: sum(int(count.get(name, 0)) for count in counts)
                for key, name in (
                    ("steps", "steps"),
                    ("repaired", "repaired"),
                    ("streamed", "streamed"),
                    ("experts missed", "missed"),
                    ("steps that fired", "gate_fires"),
                )
            },
        }
        found += [
            measurement(f"every logit: {label}, {what}, {name}", "count", [value])
            for name, value in figures.items()
        ]
    return found


def compare(listed: list[Case], results: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare each case with its reference, one of its own kind with its first answers."""
    records: list[dict[str, Any]] = []
    for case in listed:
        found = results.get(case.name)
        wanted = results.get(case.like)
        if not case.like or found is None or wanted is None:
            continue
        for index, (run, answer) in enumerate(found["answers"].items()):
            streams = run.split()[0]
            itself = case.like == case.name and "cold" in run
            if itself or f"{streams} cold" not in wanted["answers"]:
                continue
            # Answers without hashes would compare tokens alone.
            same = bool(answer["hashes"]) and answer == wanted["answers"][f"{streams} cold"]
            record = {"case": case.name, "run": run, "what": case.what, "same": same}
            if not index:
                record["counts"] = found.get("counts")
            records.append(record)
    return records


def main() -> None:
    """Run one model from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--root", type=Path, required=True, help="where checkpoints are")
    parser.add_argument("--out", type=Path, required=True, help="result file")
    parser.add_argument("--cases", default="", help="only these, by commas")
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--start-seconds", type=float, default=240.0)
    parser.add_argument("--seconds", type=float, default=500.0, help="of the whole run")
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    started = datetime.now(UTC)
    model = checkpoints.folder(args.root, args.model)
    experts = read_experts(model)
    packs = args.root / f"packs-identity-{args.model}"
    listed = cases(experts, packs)
    if args.cases:
        listed = [case for case in listed if case.name in args.cases.split(",")]
    vocabulary = checkpoints.vocabulary(model)
    prompts = [random_prompts(vocabulary, 1, length, 0)[0] for length in LENGTHS]
    specs = [spec_of(case, model, args.chunk) for case in listed]
    if args.sweep:
        eager = {"enforce_eager": True}
        common = {"model": str(model), "hashed": True, "engine": eager}
        common["environment"] = checkpoints.environment()
        specs.append(Spec(name="eager", moet={}, **common))
        moet = {**experts.pool(0.5), "packs": str(packs), "host_store": "pack"}
        specs.append(Spec(name="sweep", moet=moet, after="half arena", **common))
    results: dict[str, Any] = {}
    swept: list[dict[str, Any]] = []
    with fleet(specs, args.out.parent / f"logs-{args.out.stem}", args.start_seconds) as engines:
        for case in listed:
            left = until - time.monotonic()
            engine = engines.get(case.name)
            if engine is not None and left > 5 and (not case.hot or case.hot in engines):
                hot = engines[case.hot] if case.hot else None
                results[case.name] = run_case(engine, prompts, min(60.0, left), hot)
                print(f"{case.name}: {results[case.name]['error'] or 'served'}", flush=True)
        if args.sweep and "sweep" in engines:
            try:
                wanted = {
                    streams: engines["eager"].ask(
                        "answer", prompts=prompts, tokens=TOKENS, streams=streams
                    )
                    for streams in STREAMS
                }
                for record in sweep(engines["sweep"], experts, packs, prompts, until):
                    same = record.pop("answer") == wanted[record["streams"]]
                    swept.append({"case": "sweep", "what": "sweep", "same": same, **record})
            except EngineError as error:
                print(f"sweep: {error}\n{engines['sweep'].tail()}", flush=True)
    records = compare(listed, results) + swept
    raw = args.out.with_suffix(".raw.json")
    raw.write_text(json.dumps({"results": results, "records": records}, indent=1))
    for record in records:
        print(json.dumps(record), flush=True)
    for name, found in results.items():
        if found["error"]:
            print(f"\n===== {name}: {found['error']}\n{found['log']}", flush=True)
    notes = (
        "graphs: pools under CUDA graphs, one engine each; sweep: one engine without graphs, its "
        "pool replaced between runs",
        f"prompts of {', '.join(map(str, LENGTHS))} tokens, {TOKENS} tokens each, "
        f"{' and '.join(map(str, STREAMS))} at a time; chunked: {args.chunk} tokens a step",
    )
    found_measurements = measurements(args.model, records)
    if found_measurements:
        result = run_result("served-identity", started, found_measurements, notes=notes)
        write_result(args.out, result, force=True)
    different = [record for record in records if not record["same"]]
    failed = [name for name, found in results.items() if found["error"]]
    print(f"{len(records)} comparisons, {len(different)} differ; failed engines: {failed}")


if __name__ == "__main__":
    main()
