"""Measures served models: 2 bits against 4, pools that hold all or a part, prompts, the gate.

    PYTHONPATH=bench python -m served.speed decode pool gate --model glm --root FOLDER --out FOLDER

Parts, each with a result file PART-MODEL.json of its own, written anew after every round:

decode  stock vLLM against 2-bit experts at 1, 4 and 8 streams, with the experts' share of a pass.
profile the GPU time of each kernel of those steps.
bits    every logit of pools, fine tier and gate, as `served.identity` compares them.
same    the same of the engines that the other parts have anyway.
pool    a pool that holds every expert against the engine that needs none.
passes  the GPU's time of the forward passes of those.
misses  pools of 25 and 50 % over an arena of half the rows over packs on the disk, and stock vLLM
        with the same GPU memory for experts and the rest offloaded; prompts that stream.
gate    a gate that never fires, and one that fires at 10 and 30 % of the steps.

Engines live beside each other on one GPU and take turns, round by round; what is compared was
measured within seconds of each other.
"""

import argparse
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from moet_cli.bench import run_result
from moet_core.results import measurement, write_result
from served import checkpoints
from served.bits import bits, bits_specs
from served.fleet import Engine, EngineError, Spec, fleet
from served.kernels import expert_time
from served.settings import GIB, PROCESSES, Experts, read_experts
from served.steps import reach, wait_for

__all__ = ["Run", "main"]

GRAPHS_ALONE = "CUDA graphs of decode steps, no torch.compile"
IN_PROCESSES = "scheduler and worker of each engine in processes of their own"
IN_ONE_PROCESS = "scheduler and worker of each engine in one process"


class Run:
    """A run of one part: its engines, what was measured, and the time that is left.

    Attributes:
        experts: Of the model.
        engines: By name; only those that are of use.
        notes: For the result file.
        out: The result file.
    """

    def __init__(self, part: str, args: argparse.Namespace) -> None:
        self.part = part
        self.args = args
        self.out = args.out / f"{part}-{args.model}.json"
        self.model = checkpoints.folder(args.root, args.model)
        self.experts: Experts = read_experts(self.model)
        self.packs: Path = (args.packs or args.root) / f"packs-speed-{args.model}"
        self.engines: dict[str, Engine] = {}
        self.notes: list[str] = []
        self._until = 0.0
        self._started = datetime.now(UTC)
        self._samples: dict[tuple[str, str], list[float]] = {}

    def begin(self) -> None:
        """Begin to measure; the time of the part runs from here."""
        self._until = time.monotonic() + self.args.seconds

    @property
    def seconds_left(self) -> float:
        """Time until the part must end."""
        return self._until - time.monotonic()

    def spec(self, name: str, moet: dict[str, Any] | None, **settings: Any) -> Spec:
        """Return an engine of the model."""
        # Experts are left out in the engine's own process, which must be the worker's too.
        in_processes = self.args.processes and not settings.get("without_experts")
        own: dict[str, Any] = PROCESSES if in_processes else {}
        chunk = {"max_num_batched_tokens": self.args.chunk} if self.args.chunk else {}
        engine = {**own.get("engine", {}), **chunk, **settings.pop("engine", {})}
        return Spec(
            name=name,
            model=str(self.model),
            moet=moet,
            compiled=self.args.compiled,
            environment={**checkpoints.environment(), **own.get("environment", {})},
            engine=engine,
            **settings,
        )

    def ask(self, name: str, task: str, **arguments: Any) -> Any:
        """Have an engine do a task; None if it cannot, or if no time is left."""
        if name not in self.engines or self.seconds_left < 5:
            return None
        try:
            return self.engines[name].ask(task, self.seconds_left, **arguments)
        except EngineError as error:
            print(f"{error}\n{self.engines[name].tail()}", flush=True)
            self.notes.append(f"{name}: {task} failed")
            if self.engines[name].error:
                del self.engines[name]
            return None

    def add(self, name: str, unit: str, *samples: float) -> None:
        """Add samples of one quantity."""
        if samples:
            self._samples.setdefault((name, unit), []).extend(samples)

    def decode(
        self, name: str, streams: int, tokens: int, seed: int, label: str = "", **how: Any
    ) -> dict[str, float] | None:
        """Time decode steps of an engine and add them; return what it counted."""
        how = {"prompt": 64, **how}
        found = self.ask(name, "decode", streams=streams, tokens=tokens, seed=seed, **how)
        if found is None:
            return None
        what = f"{label or name}, {streams} streams"
        per_step = sum(found["ms"]) / len(found["ms"])
        self.add(f"decode: {what}", "tokens/s", 1000 * streams / per_step)
        self.add(f"step: {what}", "ms", float(np.median(found["ms"])))
        counts: dict[str, float] = found["counts"]
        return counts

    def write(self) -> None:
        """Write the result file with what there is."""
        if not self._samples:
            return
        found = [measurement(*key, samples) for key, samples in self._samples.items()]
        notes = (f"model: {self.args.model}, {self.experts}", *self.notes)
        kind = f"served-{self.part}"
        result = run_result(kind, self._started, found, recipe=self.args.model, notes=notes)
        write_result(self.out, result, force=True)

    def show(self) -> None:
        """Print what was measured."""
        for (name, unit), samples in self._samples.items():
            low, high = min(samples), max(samples)
            print(f"{name}: {np.median(samples):.4g} {unit} ({low:.4g} to {high:.4g})")


def decode(run: Run) -> None:
    """Compare stock NVFP4 with 2-bit experts, and look where the GPU's time goes."""
    for round_ in range(run.args.rounds):
        for streams in (1, 4, 8):
            for name in ("stock", "w2", "fp4"):
                run.decode(name, streams, run.args.tokens, seed=round_)
        run.write()
    _forward_times(run, ("without experts", "stock", "w2", "fp4"))


def profile(run: Run) -> None:
    """Look where the GPU's time goes in decode steps."""
    profiles = {}
    for streams in (1, 4, 8):
        for name in ("stock", "w2", "fp4"):
            found = run.ask(name, "profile", streams=streams, prompt=64, tokens=40)
            if not found or not found["kernels"]:
                continue
            profiles[f"{name}, {streams} streams"] = found["kernels"]
            total, experts = sum(found["kernels"].values()), expert_time(found["kernels"])
            what = f"{name}, {streams} streams"
            run.add(f"kernels of a step: {what}", "ms", total / 1000)
            run.add(f"kernels of experts: {what}", "ms", experts / 1000)
            run.out.with_suffix(".kernels.json").write_text(json.dumps(profiles, indent=1))


def _forward_times(run: Run, names: Sequence[str], streams: Sequence[int] = (1, 4, 8)) -> None:
    """Add the GPU's time of a forward pass, and the experts' share: what their absence saves."""
    for count in streams:
        medians = {}
        for name in names:
            found = run.ask(name, "forward_times", streams=count, prompt=64, tokens=80)
            if found:
                run.add(f"forward pass: {name}, {count} streams", "ms", *found)
                medians[name] = float(np.median(found))
        rest = medians.pop("without experts", None)
        for name, whole in medians.items() if rest is not None else ():
            run.add(f"share of experts: {name}, {count} streams", "fraction", 1 - rest / whole)


def decode_specs(run: Run) -> list[Spec]:
    """Return the engines of `decode`."""
    return [
        run.spec("stock", None),
        run.spec("w2", {}),
        run.spec("fp4", {"experts": "fp4"}),
        run.spec("without experts", {}, without_experts=True),
    ]


POOL_STREAMS = (1, 4, 8)


def pool(run: Run) -> None:
    """Compare pools in which nothing is missed with the engine without one.

    All rounds decode the same tokens, greedily: once the first ones have brought every expert that
    they need, the pool misses none, but where it could it has to look.
    """
    names = ("w2", "pool of all", "pool of 95 %")
    same = {"tokens": run.args.tokens, "seed": 0, "prompt": 16, "greedy": True}
    for streams in POOL_STREAMS:
        for name in names:
            for _ in range(2):
                run.ask(name, "decode", streams=streams, **same)
        for _ in range(run.args.rounds):
            for name in names:
                counts = run.decode(name, streams, **same)
                if counts:
                    run.add(f"experts missed: {name}, {streams} streams", "count", counts["missed"])
        run.write()


def passes(run: Run) -> None:
    """Time the GPU's part of decode steps over pools: what a pool adds to the forward pass."""
    _forward_times(run, ("w2", "pool of all", "pool of 95 %"), POOL_STREAMS)


def pool_specs(run: Run) -> list[Spec]:
    """Return the engines of `pool`."""
    pinned = {"host_store": "pinned", "report_seconds": 0}
    return [
        run.spec("w2", {}),
        run.spec("pool of all", {"pool": run.experts.gib(run.experts.rows), **pinned}),
        run.spec("pool of 95 %", {"pool": run.experts.gib(0.95 * run.experts.rows), **pinned}),
    ]


SHARES = {"25 %": 0.25, "50 %": 0.5}


def misses(run: Run) -> None:
    """Measure pools that miss, stock vLLM's offloading, and prompts that stream."""
    share = run.ask("50 %, arena", "usage", tokens=run.args.tokens)
    if share is not None:
        run.add("routings of the most used fifth of the experts", "fraction", share)
    for part in SHARES:
        for name in (f"{part}, arena", f"{part}, pinned"):
            run.ask(name, "decode", streams=1, prompt=64, tokens=run.args.tokens, seed=99)
    for round_ in range(run.args.rounds):
        for part in SHARES:
            for name in (f"{part}, arena", f"{part}, pinned", f"{part}, stock offload"):
                counts = run.decode(name, 1, run.args.tokens, seed=round_)
                if counts:
                    _add_counts(run, name, counts)
        run.write()
    _prompts(run)
    run.write()


def _add_counts(run: Run, name: str, counts: dict[str, float]) -> None:
    steps = counts["steps"]
    run.add(f"repaired steps: {name}", "fraction", counts["repaired"] / steps)
    run.add(f"streamed steps: {name}", "fraction", counts["streamed"] / steps)
    run.add(f"missed: {name}", "experts a step", counts["missed"] / steps)
    run.add(f"waited for rows: {name}", "ms a step", 1000 * counts["stall_seconds"] / steps)


def _prompts(run: Run) -> None:
    """Time prompts of 8k tokens, and what one pass over the experts takes on PCIe."""
    bandwidth = run.ask("all resident", "copy_bandwidth") or []
    run.add("pinned copies to the GPU", "GB/s", *bandwidth)
    bytes_ = run.experts.rows * run.experts.row_bytes("w2")
    for speed in bandwidth:
        run.add("prompt: one pass over the experts on PCIe", "s", bytes_ / speed / 1e9)
    names = ["all resident", *(f"{part}, {store}" for part in SHARES for store in STORES)]
    for round_ in range(run.args.rounds + 1):
        for name in names:
            found = run.ask(name, "prefill", tokens=run.args.prompt, seed=round_)
            if found and round_:  # the first one compiles kernels
                run.add(f"prompt: {name}", "s", found["seconds"])


STORES = ("arena", "pinned")


def misses_specs(run: Run) -> list[Spec]:
    """Return the engines of `misses`."""
    experts, prompt = run.experts, run.args.prompt
    engine = {"max_model_len": prompt + 256, "max_num_batched_tokens": prompt}
    whole = experts.rows * experts.row_bytes("fp4-nv")
    found = [run.spec("all resident", {}, engine=engine)]
    for part, share in SHARES.items():
        pool = experts.pool(share)
        packs = f"{run.packs}-{100 * share:.0f}"  # each its own, so that none waits for another
        arena = {**pool, **experts.arena(0.5), "packs": packs}
        found.append(run.spec(f"{part}, arena", arena, engine=engine))
        pinned = {**pool, "host_store": "pinned"}
        found.append(run.spec(f"{part}, pinned", pinned, engine=engine))
        offload = {
            "cpu_offload_gb": whole / GIB - pool["pool"],
            "cpu_offload_params": [
                "w13_weight",
                "w2_weight",
                "w13_weight_scale",
                "w2_weight_scale",
            ],
        }
        found.append(run.spec(f"{part}, stock offload", None, engine={**engine, **offload}))
    return found


def gate(run: Run) -> None:
    """Measure a gate that never fires, and one that fires at a tenth and a third of the steps."""
    tokens = run.args.tokens
    taus = {streams: {"never": 0.0} for streams in POOL_STREAMS}
    for streams, found in taus.items():
        seen = run.ask(
            "gate", "confidences", streams=streams, prompt=64, tokens=2 * tokens, seed=99
        )
        if seen:
            found.update({f"at {q} %": float(np.quantile(seen, q / 100)) for q in (10, 30)})
    for round_ in range(run.args.rounds):
        for streams, found in taus.items():
            run.decode("w2", streams, tokens, seed=round_)
            run.decode("pool of all", streams, tokens, seed=round_)
            for label, tau in found.items():
                run.ask("gate", "set_tau", tau=tau)
                counts = run.decode("gate", streams, tokens, seed=round_, label=f"gate {label}")
                if counts and counts["gate_checked"]:
                    fired = counts["gate_fires"] / counts["gate_checked"]
                    what = f"gate {label}, {streams} streams"
                    run.add(f"fired: {what}", "fraction of steps", fired)
                    brought = counts["gate_promoted"] / counts["gate_checked"]
                    run.add(f"brought: {what}", "experts a step", brought)
        run.write()


def gate_specs(run: Run) -> list[Spec]:
    """Return the engines of `gate`."""
    every = {"pool": run.experts.gib(run.experts.rows), "host_store": "pinned"}
    never = {"gate": "max_prob", "tau": 0.0, "prompts": "base", "report_seconds": 0}
    return [
        run.spec("w2", {}),
        run.spec("pool of all", {**every, "report_seconds": 0}),
        run.spec("gate", {**every, **run.experts.fine(0.5), **never}),
    ]


PARTS = {
    "decode": (decode_specs, decode),
    "profile": (decode_specs, profile),
    "bits": (bits_specs, bits),
    "same": (lambda run: [], bits),
    "pool": (pool_specs, pool),
    "passes": (pool_specs, passes),
    "misses": (misses_specs, misses),
    "gate": (gate_specs, gate),
}


def main() -> None:
    """Run parts from the command line; engines that several of them need are started once."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--model", required=True)
    parser.add_argument("--root", type=Path, required=True, help="where checkpoints are")
    parser.add_argument("--packs", type=Path, help="where packs are written, if not in --root")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--steps", type=Path, help="folder of the files that begin each phase")
    parser.add_argument("--only", default="", help="engines, separated by semicolons")
    parser.add_argument("--compiled", action="store_true", help="with torch.compile")
    parser.add_argument("--chunk", type=int, help="tokens of a step, for prompts read in parts")
    parser.add_argument(
        "--processes", action="store_true", help="scheduler and worker in processes of their own"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160, help="of each answer")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of long prompts")
    parser.add_argument("--start-seconds", type=float, default=240.0)
    parser.add_argument("--seconds", type=float, default=300.0, help="of each part")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    runs = [Run(part, args) for part in args.parts]
    wanted: dict[str, list[Spec]] = {run.part: PARTS[run.part][0](run) for run in runs}
    specs = {
        spec.name: spec
        for part in wanted.values()
        for spec in part
        if not args.only or spec.name in args.only.split(";")
    }
    logs = args.out / f"logs-{'-'.join(args.parts)}-{args.model}"
    with fleet(list(specs.values()), logs, args.start_seconds, args.steps) as engines:
        for name, engine in engines.items():
            print(f"{name}: {engine.error or engine.ready}", flush=True)
            if engine.error:
                print(f"===== {name}\n{engine.tail()}", flush=True)
        reach(args.steps, "ready")
        for run in runs:
            wait_for(args.steps, run.part)
            run.begin()
            run.notes.append("torch.compile and CUDA graphs" if args.compiled else GRAPHS_ALONE)
            if args.chunk:
                run.notes.append(f"steps of {args.chunk} tokens: longer prompts are read in parts")
            run.notes.append(IN_PROCESSES if args.processes else IN_ONE_PROCESS)
            names = [spec.name for spec in wanted[run.part] if spec.name in engines]
            names = names or list(engines)
            run.engines = {name: engines[name] for name in names if not engines[name].error}
            run.notes += [f"{name} did not start" for name in names if engines[name].error]
            try:
                PARTS[run.part][1](run)
            finally:
                run.write()
                run.show()
                reach(args.steps, f"{run.part}.done")


if __name__ == "__main__":
    main()
