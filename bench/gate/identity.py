"""Serves TinyMoE at the two ends of the gate, and compares every logit with plain engines.

    PYTHONPATH=bench python bench/gate/identity.py --out FILE [--tensor-parallel 2] [--chunked]

A gate that always fires, without a budget and with as many passes as it takes, must answer as an
engine whose experts are all FP4; one that never fires, with prompts read at the base, as one whose
experts are all 2-bit. Both over several sizes of both tiers, from each kind of store; also when
they are set only after the start.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from residency.identity import (
    STREAMS,
    Engine,
    check_and_count,
    describe,
    forget_heat,
    pool_gib,
    take_hashes,
)

ENDS = {
    "always": {"tau": 1.0, "gate_passes": 0},
    "never": {"tau": 0.0, "prompts": "base"},
    "set to always": {"tau": 0.0, "gate_passes": 0},
    "set to never": {"tau": 1.0, "gate_passes": 0, "prompts": "base"},
}
SET = {"set to always": {"tau": 1.0}, "set to never": {"tau": 0.0}}
"""What is set anew, on all ranks, before the first request."""
REFERENCE = {"always": "fp4", "never": "w2", "set to always": "fp4", "set to never": "w2"}
POOLS = ("minimum", "half", "all")
FINE_POOLS = ("minimum", "half")
STORES = ("pinned", "pack", "arena")


def reference(args: argparse.Namespace) -> dict[str, Any]:
    """Answers of an engine whose experts all have one precision."""
    engine = Engine(args, {"experts": args.reference})
    return {str(streams): engine.answer(streams) for streams in STREAMS}


def compare(args: argparse.Namespace, wanted: dict[str, Any], packs: Path) -> list[dict[str, Any]]:
    """Run every combination; return one record each."""
    about = {"packs": str(packs), "report_seconds": 0, "gate": "max_prob"}
    engine = Engine(args, {**about, "fine": 0.01, "tau": 0.0})
    (shape, *_) = engine.llm.collective_rpc(describe)
    (fine_row, *_) = engine.llm.collective_rpc(fine_row_bytes)
    records = []
    for pool, fine, store, end in itertools.product(args.pools, args.fine, args.stores, ENDS):
        moet = {**about, **ENDS[end], "pool": pool_gib(pool, **shape)}
        moet["fine"] = pool_gib(fine, **{**shape, "row_bytes": fine_row})
        if store == "arena":
            moet["arena"] = pool_gib("minimum", **shape)
            moet["fine_arena"] = moet["fine"]
        moet["host_store"] = store
        for streams in STREAMS:
            engine.llm.collective_rpc(forget_heat, args=(moet,))
            engine.llm.collective_rpc("reopen_pool", args=(moet,))
            if end in SET:
                engine.llm.collective_rpc("change_gate", args=(SET[end],))
            engine.llm.collective_rpc(take_hashes)
            got = engine.answer(streams)
            record = {"end": end, "pool": pool, "fine": fine, "store": store, "streams": streams}
            record["same"] = got == wanted[REFERENCE[end]][str(streams)]
            record["counts"] = engine.llm.collective_rpc(check_and_count)
            record["gate"] = engine.llm.collective_rpc(gate_counts)
            records.append(record)
            print(json.dumps(record), file=sys.stderr, flush=True)
    return records


def fine_row_bytes(worker: Any) -> int:
    """Return the length of a row of a worker's fine tier."""
    return int(worker.resident.fine.tier.shape.row.row_bytes)


def gate_counts(worker: Any) -> dict[str, Any]:
    """Return what a worker's gate counted."""
    import msgspec

    return dict(msgspec.to_builtins(worker.resident.fine.gate.counts))


def main() -> None:
    """Run one layout from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--chunked", action="store_true")
    for name, values in (("pools", POOLS), ("fine", FINE_POOLS), ("stores", STORES)):
        parser.add_argument(f"--{name}", type=lambda text: text.split(","), default=list(values))
    parser.add_argument("--reference", help="only the answers of an engine with such experts")
    args = parser.parse_args()
    if args.reference:
        args.out.write_text(json.dumps(reference(args)))
        return
    wanted = {}
    with tempfile.TemporaryDirectory() as folder:
        for experts in ("fp4", "w2"):
            answers = Path(folder) / f"{experts}.json"
            command = [sys.executable, __file__, "--reference", experts, "--out", str(answers)]
            command += ["--tensor-parallel", str(args.tensor_parallel)]
            command += ["--chunked"] if args.chunked else []
            subprocess.run(command, check=True)
            wanted[experts] = json.loads(answers.read_text())
        records = compare(args, wanted, Path(folder) / "packs")
    layout = {"tensor_parallel": args.tensor_parallel, "chunked": args.chunked}
    args.out.write_text(json.dumps({"layout": layout, "records": records}, indent=1) + "\n")
    different = [record for record in records if not record["same"]]
    print(f"{len(records)} combinations, {len(different)} differ")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
