"""`moet bench`: measures a served recipe, or the codecs, into a result file."""

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from moet_cli.machine import describe_machine, find_commit, installed_versions
from moet_cli.output import Output, make_table
from moet_core.errors import ConfigError
from moet_core.results import Measurement, Result, measurement, recorded_command, write_result

if TYPE_CHECKING:
    from moet_cli.plan import Plan

__all__ = ["Target", "bench_codecs", "bench_run", "finish", "result_path", "run_result"]


class Target(msgspec.Struct, frozen=True):
    """Where a result goes: a file (None: a new one in the current folder), replaced or not."""

    path: Path | None
    force: bool


def bench_run(output: Output, plan: "Plan", suite_name: str, target: Target) -> None:
    """Serve a plan and measure it with a suite.

    Raises:
        MoetError: the server failed, or the result file exists and may not be replaced.
    """
    # the other benchmarks do without a server, the openai package and vLLM
    from moet_cli.checks import run_checks
    from moet_cli.client import Client
    from moet_cli.launch import command_line, make_launch, wait_ready
    from moet_cli.measure import NOTES, measure
    from moet_cli.memory import MemorySampler
    from moet_cli.recipe import load_suite
    from moet_cli.supervise import Server

    suite = load_suite(suite_name)
    name = plan.recipe or plan["model"]
    started = datetime.now(UTC)
    path = result_path(target, f"{Path(name).stem}-{suite_name}", started)
    run_checks(plan)
    launch = make_launch(plan, output)
    with Server(launch) as server, MemorySampler(server.pid) as memory:
        wait_ready(server, plan)
        with Client(launch.url) as client:
            found = server.watch(lambda: measure(client, suite, output.say))
    found.append(measurement("start until first token", "s", [server.seconds_to_ready]))
    found.append(measurement("host memory", "bytes", memory.host))
    if memory.gpu:
        found.append(measurement("GPU memory", "bytes", memory.gpu))
    result = run_result(
        "serve",
        started,
        found,
        recipe=plan.recipe,
        suite=suite_name,
        server=command_line(launch.command, launch.environment),
        notes=NOTES,
    )
    finish(output, path, result, target.force)


def bench_codecs(output: Output, seconds: float, threads: int, target: Target) -> None:
    """Measure how fast experts are encoded.

    Raises:
        MoetError: the result file exists and may not be replaced.
    """
    from moet_kernels.bench import bench_encode

    started = datetime.now(UTC)
    path = result_path(target, "codecs", started)
    found = bench_encode(seconds, threads=threads)
    notes = (f"{threads} thread(s), at least {seconds:g} s a figure",)
    finish(output, path, run_result("codecs", started, found, notes=notes), target.force)


def result_path(target: Target, name: str, started: datetime) -> Path:
    """Choose the file, before anything is measured.

    Raises:
        ConfigError: it exists and may not be replaced.
    """
    path = target.path or Path(f"moet-bench-{name}-{started:%Y%m%dT%H%M%SZ}.json")
    if path.exists() and not target.force:
        raise ConfigError(
            f"The result file {path} exists already; name another file, or pass --force to "
            "replace it."
        )
    return path


def run_result(
    kind: str,
    started: datetime,
    measurements: Sequence[Measurement],
    *,
    recipe: str | None = None,
    suite: str | None = None,
    server: tuple[str, ...] | None = None,
    versions: Mapping[str, str] | None = None,
    notes: tuple[str, ...] = (),
) -> Result:
    """Put measurements together with when, where, of what and by which command they were made.

    Args:
        kind: what kind of benchmark this is.
        started: when it began, UTC.
        measurements: what was found.
        recipe: what was served, if anything was.
        suite: of measurements, where the kind has several.
        server: command line of the server that was started.
        versions: of what took part, where that is not what is installed.
        notes: what a reader must know to read the figures rightly.
    """
    return Result(
        kind=kind,
        recipe=recipe,
        suite=suite,
        started=started,
        finished=datetime.now(UTC),
        commit=find_commit(),
        versions=installed_versions() if versions is None else dict(versions),
        machine=describe_machine(),
        command=recorded_command(sys.argv, server),
        measurements=tuple(measurements),
        notes=notes,
    )


def finish(output: Output, path: Path, result: Result, force: bool) -> None:
    """Write the result file, and show the result and where it is."""
    write_result(path, result, force=force)
    output.result(
        {"event": "result", "file": str(path), "result": result}, _table(result), f"result: {path}"
    )


def _table(result: Result) -> Table:
    rows = [
        (found.name, found.unit, *(f"{x:,.6g}" for x in (found.median, found.min, found.max)))
        for found in result.measurements
    ]
    return make_table("Measured", ("what", "unit", "median", "min", "max"), rows)
