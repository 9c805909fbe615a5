"""`moet bench residency`: what pools of experts hit on recorded routing, into a result file."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from moet_cli.bench import Target, finish, result_path, run_result
from moet_cli.nearest import unknown_name
from moet_cli.output import Output
from moet_core.errors import UsageError
from moet_core.residency import worst_case
from moet_core.results import Measurement, measurement
from moet_core.simulate import POLICIES, Settings, simulate
from moet_core.traces import RoutingTrace, load_trace, together

__all__ = ["COVERAGES", "Study", "bench_residency"]

COVERAGES = (5, 10, 15, 25, 35, 50, 65, 80, 90, 100)

NOTES = (
    "simulated from recorded routing; every pool starts empty; only decode steps are counted",
    "passes that a repair adds because it changes later layers' routing are not simulated",
)


class Study(msgspec.Struct, frozen=True):
    """What to simulate.

    Attributes:
        traces: Files; each trace goes by its file's name.
        together: Simulate also that one engine serves all of them at the same time.
        coverages: Sizes of the pool, in percent of all experts; none stands for `COVERAGES`.
        policies: Names of `moet_core.simulate.POLICIES`; none stands for all.
        settings: Of the policies that have any.
    """

    traces: Sequence[Path]
    together: bool
    coverages: Sequence[float]
    policies: Sequence[str]
    settings: Settings


def bench_residency(output: Output, study: Study, target: Target) -> None:
    """Simulate every policy on every trace at every size of the pool.

    Raises:
        MoetError: a trace cannot be used, or the result file exists and may not be replaced.
    """
    started = datetime.now(UTC)
    path = result_path(target, "residency", started)
    policies = study.policies or tuple(POLICIES)
    for policy in policies:
        if policy not in POLICIES:
            raise UsageError(unknown_name("policy", policy, POLICIES))
    traces = _read(study)
    found: list[Measurement] = []
    for name, trace in traces.items():
        output.say(f"{name}: {_describe(trace)}")
        for coverage in study.coverages or COVERAGES:
            for policy in policies:
                found += _figures(name, trace, coverage, policy, study.settings)
    settings = msgspec.to_builtins(study.settings)
    notes = (
        *NOTES,
        "settings: " + ", ".join(f"{name} {value}" for name, value in settings.items()),
        *(f"{name}: {_describe(trace)}" for name, trace in traces.items()),
    )
    # Figure by figure, so that what is compared stands together.
    found.sort(key=lambda one: one.name.partition(":")[0].partition(" at ")[0])
    finish(output, path, run_result("residency", started, found, notes=notes), target.force)


def _read(study: Study) -> dict[str, RoutingTrace]:
    traces: dict[str, RoutingTrace] = {}
    for path in study.traces:
        name = path.stem
        if name in traces or (study.together and name == "together"):
            raise UsageError(f"--trace: wanted files of different names, got {name!r} twice.")
        trace = traces[name] = load_trace(path)
        if trace.prefill.all():
            raise UsageError(f"--trace {path}: wanted decode steps, found none but prefill.")
    if study.together:
        try:
            traces["together"] = together(list(traces.values()))
        except ValueError as error:
            raise UsageError(f"--together: {error}.") from error
    return traces


def _describe(trace: RoutingTrace) -> str:
    decoded = int((~trace.prefill).sum())
    step = worst_case(trace.layers, trace.experts, trace.top_k, 1)
    return (
        f"{len(trace.chosen)} tokens in {len(trace.ends)} steps, {decoded} of them decode; "
        f"{trace.layers} layers of {trace.experts} experts, of which a token uses {step}"
    )


def _figures(
    name: str, trace: RoutingTrace, coverage: float, policy: str, settings: Settings
) -> list[Measurement]:
    slots = max(1, round(trace.layers * trace.experts * coverage / 100))
    found = simulate(trace, slots, policy, settings)
    where = f"at {coverage:g} %: {name}, {policy}"
    return [
        measurement(f"hit rate {where}", "fraction of routings", [found.hit_rate]),
        measurement(f"clean steps {where}", "fraction", [found.clean / found.steps]),
        measurement(f"repaired steps {where}", "fraction", [found.repaired]),
        measurement(f"misses {where}", "experts a step", [found.misses / found.steps]),
        measurement(f"moves {where}", "rows a step", [found.moved / found.steps]),
    ]
