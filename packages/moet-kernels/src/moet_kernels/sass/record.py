"""Result files of a run on a GPU, from the bundle and what `moet_kernels.sass.gpu` wrote."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from moet_core.results import Command, Commit, Machine, Measurement, Result, measurement
from moet_kernels.sass.errors import SassError

__all__ = ["results_of"]

_EFFECTS = ("wrong", "crashed", "hung")

Rows = list[dict[str, Any]]


def results_of(bundle: Path, out: Path) -> dict[str, Result]:
    """Make a result of each kind: own kernels, one-operation kernels, seeded faults.

    Args:
        bundle: the folder that was run.
        out: what the run wrote.

    Raises:
        SassError: a file is missing or no JSON, or the bundle was not made from a clean checkout.
    """
    plan = _read(bundle / "plan.json")
    parts = {name: _read(out / f"{name}.json") for name in _PARTS}
    commit = msgspec.convert(plan["commit"], Commit | None)
    if commit is None or commit.dirty:
        raise SassError(
            f"The bundle {bundle} was made from a changed checkout, or outside of one, so no "
            "commit says what ran; commit, make it anew and run it again."
        )
    found = {name: part["found"] for name, part in parts.items()}
    own = [*_own(found["own"]), *_counts(found["registers"]), *_often(found["often"])]
    return {
        "sass-own": _result(
            "sass-own",
            [*own, *_times(found["times"]["rows"])],
            [parts[name] for name in ("own", "registers", "often", "times")],
            plan,
            found["machine"],
            [_OWN_NOTE, *(f"{b['kernel']} {b['variant']}: {b['said']}" for b in found["broken"])],
        ),
        "sass-one-op": _result(
            "sass-one-op",
            list(_one_ops(found["one_ops"]["rows"], plan["one_ops"]["opcodes"])),
            [parts["one_ops"]],
            plan,
            found["machine"],
            [_ONE_OP_NOTE],
        ),
        "sass-faults": _result(
            "sass-faults",
            list(_faults(found["faults"], plan["faults"])),
            [parts["faults"]],
            plan,
            found["machine"],
            [_FAULT_NOTE, *_misses(found["faults"], plan["faults"])],
        ),
    }


_PARTS = ("machine", "own", "broken", "registers", "often", "one_ops", "times", "faults")
_OWN_NOTE = (
    "Bytes are compared with the emulator's, errors with exact arithmetic over its largest value. "
    "Register counts are relative to what the linker writes; 1 is a right result, 0 any other end."
)
_ONE_OP_NOTE = (
    "Compiled kernels of one operation each, words of the GPU against the emulator's; an opcode "
    "has the cases of every kernel that it is in."
)
_FAULT_NOTE = (
    "One control field made wrong at a time, 12 launches each in a process that a watchdog ends; "
    "`same` means that no launch differed. The hazard checker judged the same faults unrun."
)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SassError(f"{path} cannot be read: {error}.") from error


def _result(
    kind: str,
    measurements: Sequence[Measurement],
    parts: Sequence[dict],
    plan: dict,
    machine: dict,
    notes: Sequence[str],
) -> Result:
    if not machine["rows"]:
        raise SassError(f"The run reached no GPU: {machine['error'] or machine['outcome']}.")
    return Result(
        kind=kind,
        started=min(datetime.fromisoformat(part["started"]) for part in parts),
        finished=max(datetime.fromisoformat(part["finished"]) for part in parts),
        commit=msgspec.convert(plan["commit"], Commit),
        versions=plan["versions"],
        machine=Machine(
            cpu=machine["cpu"],
            cores=machine["cores"],
            memory_bytes=machine["memory_bytes"],
            kernel=machine["kernel"],
            gpus=(machine["rows"][0]["gpu"],),
            driver=machine["driver"],
        ),
        command=Command(("python", "-m", "moet_kernels.sass.gpu", "BUNDLE", "OUT")),
        measurements=tuple(measurements),
        notes=tuple(notes),
    )


def _own(rows: Rows) -> Iterator[Measurement]:
    for row in rows:
        name = f"{row['kernel']} {row['variant']}"
        cases = [r for r in row["rows"] if "case" in r]
        yield measurement(f"{name}: ran all cases", "1", [row["outcome"] == "ok"])
        if cases:
            different = [r["different"] for r in cases]
            yield measurement(f"{name}: bytes unlike the emulator's", "bytes", different)
        errors = [r["relative_error"] for r in cases if r["relative_error"] is not None]
        if errors:
            yield measurement(f"{name}: relative error", "1", errors)


def _counts(rows: Rows) -> Iterator[Measurement]:
    for row in rows:
        right = row["outcome"] == "ok" and not any(r["different"] for r in row["rows"])
        name = f"{row['kernel']} safe, {row['more_than_linked']:+d} registers: right"
        yield measurement(name, "1", [right])


def _often(rows: Rows) -> Iterator[Measurement]:
    for row in rows:
        done = [r for r in row["rows"] if "case" in r]
        name = f"{row['kernel']} {row['variant']}"
        yield measurement(f"{name}: many launches ended", "1", [row["outcome"] == "ok"])
        if done:
            yield measurement(f"{name}: launches", "1", [r["launches"] for r in done])
            yield measurement(f"{name}: unequal launches", "1", [r["unequal"] for r in done])


def _times(rows: Rows) -> Iterator[Measurement]:
    for row in rows:
        for variant, samples in row["microseconds"].items():
            yield measurement(f"{row['kernel']} {variant}, {row['name']}", "us", samples)
            rates = [row["moved_bytes"] / 1e6 / us for us in samples]
            yield measurement(f"{row['kernel']} {variant}, {row['name']}: moved", "TB/s", rates)
        copied = row["device_copy"]
        rates = [copied["bytes"] / 1e6 / us for us in copied["microseconds"]]
        yield measurement(f"device copy beside {row['kernel']}", "TB/s", rates)


def _one_ops(rows: Rows, opcodes: dict[str, list[str]]) -> Iterator[Measurement]:
    cases: Counter[str] = Counter()
    mismatches: Counter[str] = Counter()
    for row in rows:
        for opcode in opcodes[row["name"]]:
            cases[opcode] += row["cases"]
            mismatches[opcode] += row["mismatches"]
    for opcode in sorted(cases):
        yield measurement(f"words: {opcode}, compared", "1", [cases[opcode]])
        yield measurement(f"words: {opcode}, unlike", "1", [mismatches[opcode]])


def _faults(rows: Rows, faults: Rows) -> Iterator[Measurement]:
    counted: Counter[str] = Counter()
    for row in rows:
        fault = faults[row["fault"]]
        found = "found" if fault["found"] else "not found"
        counted[f"{fault['kernel']} {fault['variant']}: {row['outcome']}, {found}"] += 1
    for name in sorted(counted):
        yield measurement(name, "1", [counted[name]])


def _misses(rows: Rows, faults: Rows) -> Iterator[str]:
    for row in rows:
        fault = faults[row["fault"]]
        if row["outcome"] in _EFFECTS and not fault["found"]:
            yield (
                f"Missed: {fault['kernel']} {fault['variant']} at {16 * fault['index']:#06x} "
                f"`{fault['text']}`: {fault['kind']}, {fault['was']} to {fault['now']}, "
                f"{row['outcome']}."
            )
