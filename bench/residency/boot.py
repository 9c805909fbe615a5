"""Times starts with and without packs, phase by phase, and the memory that each takes.

    python bench/residency/boot.py bench/results/residency-boot.json [--rounds 3]

A synthetic Glm4Moe in modelopt NVFP4 is started in a process of its own, four ways in turn: with
all rows kept in memory, converting; converting and writing packs; from those packs; and from those
packs without the shards that hold the experts. Pool and arena hold a part of the experts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

POOL_SHARE, ARENA_SHARE = 0.25, 0.25
WAYS = ("rows in memory", "writing packs", "from packs", "from packs, expert shards deleted")


def memory_without_files() -> int:
    """Return the memory of this process that no file backs, the arena's mapping included."""
    parts = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(parts[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


class PeakMemory:
    """The most memory while a block runs, above what there was before, every millisecond."""

    def __enter__(self) -> "PeakMemory":
        self.before = self.peak = memory_without_files()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.is_set():
            self.peak = max(self.peak, memory_without_files())
            time.sleep(0.001)


def start(model: Path, moet: dict[str, Any]) -> dict[str, float]:
    """Start one engine in this process; return seconds by phase and bytes."""
    from vllm import LLM

    from moet_vllm import worker

    found: dict[str, float] = {}
    load = worker.MoetWorker.load_model

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        started = time.perf_counter()
        with PeakMemory() as memory:
            load(self, *args, **kwargs)
        found["load seconds"] = time.perf_counter() - started
        found["load bytes"] = memory.peak - memory.before
        found.update({f"{what} seconds": took for what, took in self.phases.items()})
        shape = self.resident.shape
        pool = (shape.slots + shape.ring) * shape.row.row_bytes
        host = self.resident.store.host_bytes
        rest = sum(p.nbytes for p in self.model_runner.get_model().parameters())
        found["pool bytes"] = pool
        found["host store bytes"] = host
        found["rest of the model bytes"] = rest
        above = found["load bytes"] - pool - host - rest
        found["above all of these layers"] = above / (shape.experts * shape.row.row_bytes)

    worker.MoetWorker.load_model = load_model
    started = time.perf_counter()
    llm = LLM(
        str(model),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=2,
        skip_tokenizer_init=True,
        additional_config={"moet": moet},
        worker_cls="moet_vllm.worker.MoetWorker",
        scheduler_cls="moet_vllm.scheduler.make_scheduler",
    )
    found["start seconds"] = time.perf_counter() - started
    tokens = llm.generate({"prompt_token_ids": [5, 6, 7]}, use_tqdm=False)[0].outputs[0].token_ids
    found["first token"] = tokens[0]
    return found


def delete_expert_shards(model: Path) -> int:
    """Delete the shards that hold nothing but routed experts; return their number."""
    index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    kept = {shard for tensor, shard in index.items() if ".mlp.experts." not in tensor}
    gone = set(index.values()) - kept
    for shard in gone:
        (model / shard).unlink()
    return len(gone)


def main() -> None:
    """Run the ways in turn, or one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        job = json.loads(args.one)
        args.out.write_text(json.dumps(start(Path(job["model"]), job["moet"])))
        return
    from moet_cli.bench import run_result
    from moet_core.results import measurement, write_result
    from moet_vllm.synthetic import Shape, write_checkpoint

    began = datetime.now(UTC)
    shape = Shape(hidden=1024, intermediate=512, layers=9, experts=64, top_k=4, shards=24)
    samples: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            model = write_checkpoint(Path(folder) / "model", source="nvfp4", shape=shape)
            answers = set()
            for way in WAYS:
                if way == WAYS[-1] and delete_expert_shards(model) == 0:
                    raise RuntimeError("no shard holds experts alone; use more shards")
                found = run(way, model, Path(folder) / "packs")
                answers.add(found.pop("first token"))
                for what, value in found.items():
                    samples.setdefault((way, what), []).append(value)
            if len(answers) != 1:
                raise RuntimeError(f"the ways do not agree on the first token: {answers}")
    measurements = [
        measurement(
            f"{way}: {what.rpartition(' ')[0]}",
            {"seconds": "s", "bytes": "MB", "layers": "layers"}[what.rpartition(" ")[2]],
            [value / (1e6 if what.endswith("bytes") else 1) for value in values],
        )
        for (way, what), values in samples.items()
    ]
    notes = (
        "load (MB): the most memory that no file backs while the model loaded, above what there "
        "was before; it holds the pool too, since the device is the CPU",
        "above all of these: what remains of it after pool, host store (arena and staging, or all "
        "rows) and the model without its experts, in layers of 64 experts",
    )
    write_result(args.out, run_result("residency-boot", began, measurements, notes=notes))


def run(way: str, model: Path, packs: Path) -> dict[str, float]:
    """Start an engine in one way, in a process of its own."""
    from moet_core.row import row_layout

    row = row_layout("w2", 1024, 512).row_bytes
    total = 8 * 64 * row / 2**30
    moet: dict[str, Any] = {"pool": total * POOL_SHARE, "report_seconds": 0}
    if way != WAYS[0]:
        moet |= {"packs": str(packs), "arena": total * ARENA_SHARE}
    with tempfile.NamedTemporaryFile() as out:
        job = json.dumps({"model": str(model), "moet": moet})
        subprocess.run([sys.executable, __file__, out.name, "--one", job], check=True)
        return dict(json.loads(Path(out.name).read_text()))


if __name__ == "__main__":
    main()
