"""The part `bits` of `served.speed`: every logit of pools and of the gate, under CUDA graphs."""

import json
from typing import TYPE_CHECKING

from served import checkpoints, identity
from served.fleet import Spec
from served.tasks import random_prompts

if TYPE_CHECKING:
    from served.speed import Run

__all__ = ["bits", "bits_specs"]

NAMES = ("w2", "fp4", "half arena", "half pinned", "least pinned", "gate always", "gate never")


def bits(run: "Run") -> None:
    """Compare every logit of pools and of the gate with those of engines without."""
    vocabulary = checkpoints.vocabulary(run.model)
    prompts = [random_prompts(vocabulary, 1, length, 0)[0] for length in identity.LENGTHS]
    results = {}
    for case in _cases(run):
        run.ask(case.name, "hash_all", on=True)
        if case.name in run.engines:
            seconds = max(1.0, min(60.0, run.seconds_left))
            results[case.name] = identity.run_case(run.engines[case.name], prompts, seconds)
            print(f"{case.name}: {results[case.name]['error'] or 'served'}", flush=True)
        run.ask(case.name, "hash_all", on=False)
    records = identity.compare(_cases(run), results)
    for record in records:
        print(json.dumps(record), flush=True)
    for one in identity.measurements(run.args.model, records):
        run.add(one.name, one.unit, *one.samples)
    names = [name for name, found in results.items() if not found["error"]]
    run.notes.append(f"compared: {', '.join(names)}; cold and warm")


def bits_specs(run: "Run") -> list[Spec]:
    """Return the engines of `bits`."""
    return [run.spec(case.name, case.moet) for case in _cases(run)]


def _cases(run: "Run") -> list[identity.Case]:
    listed = identity.cases(run.experts, run.packs.with_name(f"packs-bits-{run.args.model}"))
    return [case for case in listed if case.name in NAMES]
