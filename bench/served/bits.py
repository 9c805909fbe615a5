"""The parts `bits` and `same` of `served.speed`: every logit of engines that must agree."""

import json
from typing import TYPE_CHECKING

from served import checkpoints, identity
from served.fleet import Spec
from served.tasks import random_prompts

if TYPE_CHECKING:
    from served.speed import Run

__all__ = ["bits", "bits_specs"]

NAMES = (
    *("w2", "fp4", "half arena", "hot arena", "half pinned", "least pinned", "auto"),
    *("gate always", "gate never"),
)

LIKE = {
    **{name: name for name in ("w2", "fp4", "all resident")},
    **dict.fromkeys(("half arena", "hot arena", "half pinned", "least pinned", "auto"), "w2"),
    "gate never": "w2",
    "gate always": "fp4",
    **dict.fromkeys(("pool of all", "pool of 95 %", "gate"), "w2"),
    **dict.fromkeys(("25 %, arena", "50 %, arena", "25 %, pinned", "50 %, pinned"), "all resident"),
}
"""Engines of all parts, and whose bits they must give; `gate` as long as it never fires."""


HOT = {"hot arena": "half arena"}
"""Engines whose pool begins with what another one's holds, once that has served."""


def bits(run: "Run") -> None:
    """Compare every logit of the engines that are there with those of the ones without a pool."""
    vocabulary = checkpoints.vocabulary(run.model)
    prompts = [random_prompts(vocabulary, 1, length, 0)[0] for length in identity.LENGTHS]
    cases = [
        identity.Case(name=name, moet={}, like=like, what=_what(name))
        for name, like in LIKE.items()
        if {name, like, HOT.get(name, name)} <= run.engines.keys()
    ]
    results = {}
    for name in dict.fromkeys([*(case.like for case in cases), *(case.name for case in cases)]):
        run.ask(name, "hash_all", on=True)
        if name in run.engines:
            seconds = max(1.0, min(60.0, run.seconds_left))
            hot = run.engines[HOT[name]] if name in HOT else None
            results[name] = identity.run_case(run.engines[name], prompts, seconds, hot)
            print(f"{name}: {results[name]['error'] or 'served'}", flush=True)
        run.ask(name, "hash_all", on=False)
    records = identity.compare(cases, results)
    for record in records:
        print(json.dumps(record), flush=True)
    for one in identity.measurements(run.args.model, records):
        run.add(one.name, one.unit, *one.samples)
    names = [
        f"{c.name} with {c.like}" for c in cases if not results.get(c.name, {}).get("error", "-")
    ]
    if "auto" in run.engines:
        shape = run.engines["auto"].ready["shape"]
        rows = shape["layers"] * shape["experts"]
        run.notes.append(f"auto: {shape['slots']} slots for {rows} experts")
    run.notes.append(f"compared, cold and warm, 1 and 4 streams: {'; '.join(names)}")


def _what(name: str) -> str:
    if LIKE[name] == name:
        return "again without a pool"
    return "gate" if "gate" in name else "pool"


def bits_specs(run: "Run") -> list[Spec]:
    """Return the engines of `bits`."""
    found = []
    for case in identity.cases(run.experts, run.packs):
        if case.name in NAMES:
            # Packs of its own each, so that none waits for another.
            folder = run.packs.with_name(f"packs-{case.name.replace(' ', '-')}-{run.args.model}")
            moet = {**case.moet, "packs": str(folder)} if "packs" in case.moet else case.moet
            found.append(run.spec(case.name, moet, engine=case.engine))
    return found
