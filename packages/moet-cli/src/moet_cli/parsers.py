"""`moet bench parsers`: what reading replies costs, into a result file."""

from datetime import UTC, datetime
from pathlib import Path

from moet_cli.bench import Target, finish, result_path, run_result
from moet_cli.output import Output

__all__ = ["bench_parsers"]


def bench_parsers(output: Output, runs: int, out: Path | None, force: bool) -> None:
    """Measure the parsers of every model family.

    Raises:
        MoetError: the result file exists and may not be replaced.
    """
    from moet_vllm.parsers.bench import NOTES, measure_parsers

    started = datetime.now(UTC)
    path = result_path(Target(out, force), "parsers", started)
    found = measure_parsers(runs, output.say)
    finish(output, path, run_result("parsers", started, found, notes=NOTES), force)
