"""A whole run: our kernels, why they fail if they do, many launches, times, seeded faults."""

import itertools
import json
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moet_kernels.sass.gpu.case import Image, Plan, read_plan
from moet_kernels.sass.gpu.task import Clock, Row, crashed_at, run_task

__all__ = ["run_bundle"]

OWN = ("safe", "tuned")
_PROCESSES = 6
_TASK_SECONDS = 12
_LAUNCHES = 1000
_COUNTS_BELOW = 3  # register counts tried: as linked, and down to this many fewer

Run = Callable[..., Row]


def run_bundle(
    bundle: Path, out: Path, seconds: float, start: Callable[..., Row] = run_task
) -> bool:
    """Run a bundle and write one file of JSON for each part.

    Args:
        bundle: the folder.
        out: where the files go.
        seconds: for all of it; what is not reached is said to be so.
        start: runs a task where it can crash.

    Returns:
        Whether there was a GPU to run it on.
    """
    out.mkdir(parents=True, exist_ok=True)
    plan, clock = read_plan(bundle), Clock(seconds)

    def run(name: str, *arguments: Any, limit: float = _TASK_SECONDS) -> Row:
        return start(bundle, name, list(arguments), clock, limit)

    def part(name: str, work: Callable[[], Any]) -> Any:
        started = datetime.now(UTC).isoformat()
        found = work()
        finished = datetime.now(UTC).isoformat()
        record = {"started": started, "finished": finished, "found": found}
        (out / f"{name}.json").write_text(json.dumps(record, indent=1))
        print(f"{name}: done, {clock.left():.0f} s left", flush=True)  # noqa: T201
        return found

    described = part("machine", lambda: machine(run("describe")))
    if described["outcome"] != "ok":
        print(f"no GPU: {described['error'] or described['outcome']}", flush=True)  # noqa: T201
        return False
    own = part("own", lambda: once(run, plan))
    for line in verdicts(own):
        print(line, flush=True)  # noqa: T201
    broken = [row for row in own if row["variant"] in OWN and row["outcome"] != "ok"]
    part("broken", lambda: [explain(run, bundle, plan, row) for row in broken])
    part("registers", lambda: counts(run, bundle, plan))
    right = [(row["kernel"], row["variant"]) for row in own if equals_emulator(row)]
    part("often", lambda: often(run, [kv for kv in right if kv[1] in OWN]))
    part("one_ops", lambda: run("one_ops"))
    running = {
        kernel: [r["variant"] for r in own if r["kernel"] == kernel and r["outcome"] == "ok"]
        for kernel in plan["kernels"]
    }
    part("times", lambda: run("times", running))
    part("faults", lambda: faults(run, plan, right))
    return True


def machine(described: Row) -> Row:
    """What the run is on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    version = Path("/sys/module/nvidia/version")
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "kernel": f"{platform.system()} {platform.release()}",
        "driver": version.read_text().strip() if version.exists() else None,
        **described,
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def once(run: Run, plan: Plan) -> list[Row]:
    """Every variant of every kernel, once on every case."""
    wanted = [(k, v) for k, described in plan["kernels"].items() for v in described["variants"]]
    found = _parallel(lambda kv: run("once", *kv), wanted)
    return [
        {"kernel": kernel, "variant": variant, **row}
        for (kernel, variant), row in zip(wanted, found, strict=True)
    ]


def equals_emulator(row: Row) -> bool:
    """Whether a variant ran and gave the emulator's bytes in every case."""
    return row["outcome"] == "ok" and not any(r.get("different") for r in row["rows"])


def verdicts(own: Iterable[Row]) -> Iterable[str]:
    """One line for each variant."""
    for row in own:
        results = [r for r in row["rows"] if "case" in r]
        different = sum(r["different"] for r in results)
        said = f"{len(results)} cases, {different} bytes differ from the emulator"
        if row["outcome"] != "ok":
            case = crashed_at(row)
            where = "before its first case" if case is None else f"in case {case}"
            said = f"{row['outcome']} {where}: {row['error']}"
        yield f"{row['kernel']} {row['variant']}: {said}"


def explain(run: Run, bundle: Path, plan: Plan, row: Row) -> Row:
    """Name the first instruction that a crashing kernel's GPU does not take."""
    kernel, variant = row["kernel"], row["variant"]
    cut = run("cut", kernel, variant)
    count = crashed_at(cut)
    texts = Image(bundle, plan, kernel, variant).texts
    explained: Row = {"kernel": kernel, "variant": variant, "cut": count, "error": cut["error"]}
    if count is None:
        fine = cut["outcome"] == "ok"
        explained["said"] = f"no cut of the first case{'' if fine else ', none was tried'}"
    elif count == 0:
        explained["said"] = "the container: even a lone EXIT fails"
    else:
        explained["index"], explained["instruction"] = count - 1, texts[count - 1]
        explained["said"] = f"{texts[count - 1]} at {16 * (count - 1):#06x}"
        explained["without_it"] = run("without", kernel, variant, count - 1)
    print(f"{kernel} {variant} first fails at: {explained['said']}", flush=True)  # noqa: T201
    return explained


def counts(run: Run, bundle: Path, plan: Plan) -> list[Row]:
    """Our kernels with fewer and with more registers counted than the linker does."""
    wanted = []
    for kernel in plan["kernels"]:
        linked = Image(bundle, plan, kernel, OWN[0]).registers
        fewer = range(linked - _COUNTS_BELOW, linked + 1)
        wanted += [(kernel, count - linked, count) for count in (*fewer, min(linked + 64, 255))]
    found = _parallel(lambda w: run("counted", w[0], OWN[0], w[2]), wanted)
    return [
        {"kernel": kernel, "more_than_linked": more, "count": count, **row}
        for (kernel, more, count), row in zip(wanted, found, strict=True)
    ]


def often(run: Run, wanted: Sequence[tuple[str, str]]) -> list[Row]:
    """Kernels that are right, many times."""
    found = _parallel(lambda kv: run("often", *kv, _LAUNCHES, limit=20), wanted)
    return [
        {"kernel": kernel, "variant": variant, **row}
        for (kernel, variant), row in zip(wanted, found, strict=True)
    ]


def faults(run: Run, plan: Plan, right: Sequence[tuple[str, str]]) -> list[Row]:
    """All seeded faults of kernels that are right; what crashes or hangs costs one process."""
    kernel_of = [case["kernel"] for case in plan["cases"]]
    wanted = [
        index
        for index, fault in enumerate(plan["faults"])
        if (kernel_of[fault["case"]], fault["variant"]) in right
    ]
    size = plan["fault_batch"]
    batches = [wanted[at : at + size] for at in range(0, len(wanted), size)]

    def work(batch: list[int]) -> list[Row]:
        outcomes: list[Row] = []
        while batch:
            found = run("faults", batch)
            outcomes += [
                row | {"outcome": "wrong" if row["wrong_launches"] else "same"}
                for row in found["rows"]
                if "fault" in row
            ]
            failed = crashed_at(found)
            if failed is None or found["outcome"] == "no time left":
                break
            outcomes.append({"fault": failed, "outcome": found["outcome"]})
            batch = batch[batch.index(failed) + 1 :]
        return outcomes

    return sorted(itertools.chain(*_parallel(work, batches)), key=lambda row: row["fault"])


def _parallel(work: Callable[[Any], Any], wanted: Iterable[Any]) -> list[Any]:
    with ThreadPoolExecutor(_PROCESSES) as pool:
        return list(pool.map(work, wanted))
