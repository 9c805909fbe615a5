"""`moet bench parsers`: what reading replies costs, into a result file."""

import sys
from datetime import UTC, datetime
from pathlib import Path

from moet_cli.machine import describe_machine, find_commit, installed_versions
from moet_cli.output import Output, make_table
from moet_core.errors import ConfigError
from moet_core.results import Result, recorded_command, write_result

__all__ = ["bench_parsers"]


def bench_parsers(output: Output, runs: int, out: Path | None, force: bool) -> None:
    """Measure the parsers of every model family.

    Raises:
        MoetError: the result file exists and may not be replaced.
    """
    from moet_vllm.parsers.bench import NOTES, measure_parsers

    started = datetime.now(UTC)
    path = out or Path(f"moet-bench-parsers-{started:%Y%m%dT%H%M%SZ}.json")
    if path.exists() and not force:
        raise ConfigError(
            f"The result file {path} exists already; name another file, or pass --force to "
            "replace it."
        )
    found = measure_parsers(runs, output.say)
    result = Result(
        kind="parsers",
        started=started,
        finished=datetime.now(UTC),
        commit=find_commit(),
        versions=installed_versions(),
        machine=describe_machine(),
        command=recorded_command(("moet", *sys.argv[1:])),
        measurements=tuple(found),
        notes=NOTES,
    )
    write_result(path, result, force=force)
    rows = [(m.name, m.unit, *(f"{x:,.4g}" for x in (m.median, m.min, m.max))) for m in found]
    output.result(
        {"event": "result", "file": str(path), "result": result},
        make_table("Reading replies", ("what", "unit", "median", "min", "max"), rows),
        f"result: {path}",
    )
