"""`moet kernels learn | measure | bundle | record`: tables and result files of the toolchain."""

import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from moet_cli.machine import find_commit
from moet_cli.output import Output
from moet_core.results import Result, write_result

if TYPE_CHECKING:  # the toolchain is imported when it is used
    from moet_kernels.sass.study import Study

__all__ = ["run_bundle", "run_learn", "run_measure", "run_record"]


def run_learn(output: Output, folder: Path) -> None:
    """Learn the tables of every architecture from the corpus and write them.

    Raises:
        MoetError: a program of the CUDA toolkit is missing.
    """
    from moet_kernels.sass.table import save

    for studied in _studies(0):
        path = folder / f"{studied.arch}.json.gz"
        save(studied.table, path)
        forms = len(studied.table.forms)
        output.result(
            {"event": "learn", "arch": studied.arch, "forms": forms, "out": str(path)},
            f"{studied.arch}: {forms} forms in {path}",
        )


def _studies(splits: int) -> list["Study"]:
    from moet_kernels.sass.arch import ARCHITECTURES
    from moet_kernels.sass.study import study

    with tempfile.TemporaryDirectory() as folder:
        return [study(a, Path(folder) / a.name, range(splits)) for a in ARCHITECTURES.values()]


def run_measure(output: Output, splits: int, out: Path, force: bool) -> None:
    """Study the corpus of every architecture, into a result file.

    Raises:
        MoetError: a program of the CUDA toolkit is missing, or the file exists.
    """
    from moet_cli.bench import Target, result_path, run_result
    from moet_kernels.sass.study import measurements_of

    started = datetime.now(UTC)
    path = result_path(Target(out, force), "sass-corpus", started)
    studies = _studies(splits)
    result = run_result(
        "sass-corpus",
        started,
        [m for studied in studies for m in measurements_of(studied)],
        versions=studies[0].table.tools,
        notes=(
            "Halves are random halves of the kernels, in every variant each; asked are the "
            "distinct words of the second half that the first has not.",
            *(f"Refused on {s.arch}, form: words: {', '.join(s.refused)}." for s in studies),
        ),
    )
    _write(output, path, result, force)


def run_bundle(output: Output, folder: Path) -> None:
    """Make the bundle that `python -m moet_kernels.sass.gpu` runs on a GPU.

    Raises:
        MoetError: a program of the CUDA toolkit is missing.
    """
    from moet_kernels.sass.bundle import make_bundle

    plan = make_bundle(folder, find_commit())
    counts = {name: len(plan[name]) for name in ("kernels", "cases", "faults")}
    output.result(
        {"event": "bundle", "folder": str(folder), **counts},
        f"{folder}: " + ", ".join(f"{count} {name}" for name, count in counts.items()),
    )


def run_record(output: Output, bundle: Path, found: Path, folder: Path, force: bool) -> None:
    """Make result files of what a GPU gave.

    Raises:
        MoetError: a part is missing, or a file exists and may not be replaced.
    """
    from moet_kernels.sass.record import results_of

    for name, result in results_of(bundle, found).items():
        _write(output, folder / f"{name}.json", result, force)


def _write(output: Output, path: Path, result: Result, force: bool) -> None:
    write_result(path, result, force=force)
    output.result({"event": "result", "file": str(path), "result": result}, f"result: {path}")
