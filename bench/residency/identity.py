"""Serves TinyMoE with every expert resident and over many pools, and compares every logit.

    python bench/residency/identity.py --out FILE [--tensor-parallel 2] [--pipeline-parallel 2]
                                       [--chunked] [--pools minimum,half] [--stores pinned,pack]

One process is one engine layout: a reference engine first, in a process of its own, then one
engine whose pool is closed and opened again for each combination of pool size, host store, state
(cold; warm: after the same requests; preloaded: with the hot set of an earlier run) and number of
requests at a time. Compared are the tokens and the SHA-256 of the logits of every step.

    python bench/residency/identity.py --out RESULT --merge FILE FILE...

makes one result file of several layouts.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Requests must be handed over all at once: what a step holds decides its rounding.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"

PROMPTS = (
    "def add(a, b):\n    return a +",
    "The capital of the country is a city that lies on a river, and",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = ",
    "12 + 30 = 42\n7 + 5 = 12\n100 - 1 = ",
)
TOKENS = 8
POOLS = ("minimum", "quarter", "half", "all but one", "all")
STORES = ("pinned", "pack", "arena")
STATES = ("cold", "warm", "preloaded")
STREAMS = (1, 4)


def hash_logits(worker: Any) -> None:
    """Keep the hash of every step's logits on the worker."""
    import hashlib

    worker.hashes = []
    model = worker.model_runner.model
    compute = model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        if logits is not None:
            worker.hashes.append(hashlib.sha256(logits.float().numpy().tobytes()).hexdigest())
        return logits

    model.compute_logits = compute_logits


def take_hashes(worker: Any) -> list[str]:
    """Return the hashes kept since the last call."""
    hashes, worker.hashes = worker.hashes, []
    return hashes


def check_and_count(worker: Any) -> dict[str, int]:
    """Check every table and byte of a worker's pool; return what it counted."""
    import msgspec

    if worker.resident is None:
        return {}
    worker.resident.check_integrity()
    if hasattr(worker.resident.store, "check_integrity"):
        worker.resident.store.check_integrity()
    return msgspec.to_builtins(worker.resident.counts)


def save_heat(worker: Any) -> None:
    """Keep a worker's hot set beside its packs."""
    from moet_vllm.residency.heat import save_hot_keys

    save_hot_keys(worker.resident)


def pool_gib(pool: str, row_bytes: int, experts: int, layers: int) -> float | str:
    """Return the size of a pool by name; the minimum is one layer."""
    total = experts * layers
    slots = {
        "minimum": experts,
        "quarter": max(experts, total // 4),
        "half": total // 2,
        "all but one": total - 1,
        "all": total,
    }[pool]
    return slots * row_bytes / 2**30


class Engine:
    """One engine; `moet` is the plugin's configuration."""

    def __init__(self, args: argparse.Namespace, moet: dict[str, Any]) -> None:
        from vllm import LLM

        from moet_vllm import tinymoe

        world = args.tensor_parallel * args.pipeline_parallel
        if world > 1:
            cores = os.cpu_count() or 1
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(i % cores) for i in range(world))
        classes = {}
        if "packs" in moet or "pool" in moet:
            classes = {
                "worker_cls": "moet_vllm.worker.MoetWorker",
                "scheduler_cls": "moet_vllm.scheduler.make_scheduler",
            }
        self.llm = LLM(
            str(tinymoe.CHECKPOINT),
            dtype="bfloat16",
            tensor_parallel_size=args.tensor_parallel,
            pipeline_parallel_size=args.pipeline_parallel,
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=4,
            max_num_batched_tokens=16 if args.chunked else 512,
            enable_prefix_caching=False,
            seed=0,
            additional_config={"moet": moet},
            **classes,
        )
        self.llm.collective_rpc(hash_logits)

    def answer(self, streams: int) -> dict[str, Any]:
        """Serve the prompts, so many at a time; return tokens and hashes of all logits."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=TOKENS, min_tokens=TOKENS)
        tokens = []
        for first in range(0, len(PROMPTS), streams):
            batch = list(PROMPTS[first : first + streams])
            for request in self.llm.generate(batch, greedy, use_tqdm=False):
                tokens.append(list(request.outputs[0].token_ids))
        hashes = [part for part in self.llm.collective_rpc(take_hashes) if part]
        return {"tokens": tokens, "hashes": hashes}


def reference(args: argparse.Namespace) -> dict[str, Any]:
    """Answers of an engine in which every expert has its place for good."""
    engine = Engine(args, {})
    return {str(streams): engine.answer(streams) for streams in STREAMS}


def compare(args: argparse.Namespace, wanted: dict[str, Any], packs: Path) -> list[dict[str, Any]]:
    """Run every combination; return one record each."""
    engine = Engine(args, {"packs": str(packs), "report_seconds": 0})
    (shape, *_) = engine.llm.collective_rpc(describe)
    records = []
    for pool, store, streams in itertools.product(args.pools, args.stores, STREAMS):
        moet = {"packs": str(packs), "report_seconds": 0, "host_store": store}
        moet["pool"] = pool_gib(pool, **shape)
        if store == "arena":
            moet["arena"] = pool_gib("minimum", **shape)
        for state in STATES if store != "pinned" else STATES[:2]:
            if state != "preloaded":
                engine.llm.collective_rpc(forget_heat, args=(moet,))
            engine.llm.collective_rpc("reopen_pool", args=(moet,))
            engine.llm.collective_rpc(take_hashes)
            if state == "warm":
                engine.answer(streams)
            started = time.perf_counter()
            got = engine.answer(streams)
            record = {"pool": pool, "store": store, "state": state, "streams": streams}
            record["seconds"] = round(time.perf_counter() - started, 3)
            record["same"] = got == wanted[str(streams)]
            record["counts"] = engine.llm.collective_rpc(check_and_count)
            records.append(record)
            print(json.dumps(record), file=sys.stderr, flush=True)
            if store != "pinned":
                engine.llm.collective_rpc(save_heat)
    return records


def describe(worker: Any) -> dict[str, int]:
    """Return the sizes that pools are reckoned from."""
    shape = worker.resident.shape
    return {
        "row_bytes": shape.row.row_bytes,
        "experts": shape.experts,
        "layers": len(shape.layers),
    }


def forget_heat(worker: Any, moet: dict[str, Any]) -> None:
    """Delete the hot sets beside the packs."""
    for folder in moet["packs"].split(","):
        for path in Path(folder).glob("*.heat.json"):
            path.unlink(missing_ok=True)


def merge(out: Path, files: list[Path]) -> None:
    """Write the result file of several layouts."""
    from moet_cli.bench import run_result
    from moet_core.results import measurement, write_result

    found = []
    began = min(datetime.fromtimestamp(file.stat().st_mtime, UTC) for file in files)
    for file in files:
        run = json.loads(file.read_text())
        layout, records = run["layout"], run["records"]
        name = "one rank"
        if layout["tensor_parallel"] > 1:
            name = f"{layout['tensor_parallel']} tensor-parallel ranks"
        if layout["pipeline_parallel"] > 1:
            name = f"{layout['pipeline_parallel']} pipeline stages"
        name += ", chunked prompts" if layout["chunked"] else ""
        counts = [part for record in records for part in record["counts"]]
        figures = {
            "combinations": len(records),
            "that differ": sum(not record["same"] for record in records),
            "steps": sum(part["steps"] for part in counts),
            "repaired": sum(part["repaired"] for part in counts),
            "streamed": sum(part["streamed"] for part in counts),
            "experts missed": sum(part["missed"] for part in counts),
        }
        found += [
            measurement(f"every logit: {name}, {what}", "count", [value])
            for what, value in figures.items()
        ]
    notes = (
        "combinations of pool size, host store, state and requests at a time; steps and experts "
        "are added up over ranks",
    )
    write_result(out, run_result("residency-identity", began, found, notes=notes))


def main() -> None:
    """Run one layout from the command line, or merge several."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--chunked", action="store_true")
    parser.add_argument("--pools", type=lambda text: text.split(","), default=list(POOLS))
    parser.add_argument("--stores", type=lambda text: text.split(","), default=list(STORES))
    parser.add_argument("--merge", type=Path, nargs="+", help="files of layouts")
    parser.add_argument("--reference", action="store_true", help="only the reference's answers")
    args = parser.parse_args()
    if args.merge:
        merge(args.out, args.merge)
        return
    if args.reference:
        args.out.write_text(json.dumps(reference(args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "reference.json"
        switches = ["--chunked"] if args.chunked else []
        parallel = ["--tensor-parallel", args.tensor_parallel]
        parallel += ["--pipeline-parallel", args.pipeline_parallel]
        command = [sys.executable, __file__, "--reference", "--out", answers, *parallel, *switches]
        subprocess.run([str(part) for part in command], check=True)
        wanted = json.loads(answers.read_text())
        records = compare(args, wanted, Path(folder) / "packs")
    layout = {"tensor_parallel": args.tensor_parallel, "pipeline_parallel": args.pipeline_parallel}
    layout["chunked"] = args.chunked
    args.out.write_text(json.dumps({"layout": layout, "records": records}, indent=1) + "\n")
    different = [record for record in records if not record["same"]]
    print(f"{len(records)} combinations, {len(different)} differ")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
