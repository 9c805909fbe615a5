"""`moet pack verify` and `moet bench store`: packs of experts, and the drive they lie on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from moet_cli.machine import installed_versions
from moet_cli.output import Output, make_table
from moet_core.results import write_result

if TYPE_CHECKING:
    from moet_store.verify import Report

__all__ = ["add_commands"]

MIB = 2**20
GIB = 2**30

Register = Callable[..., Callable[[Any], click.Command]]


def add_commands(command: Register, cli: click.Group, bench: click.Group) -> None:
    """Add the commands of this file to the groups of `moet`."""
    pack = type(cli)("pack", help="Check packs of experts.")
    cli.add_command(pack)

    @command(pack, "verify")
    @click.argument("path", type=click.Path(path_type=Path))
    @click.option("--deep", is_flag=True, help="Read every row and compare it with its checksum.")
    def verify(output: Output, path: Path, deep: bool) -> int:
        """Check a pack file, or every pack in a folder."""
        return run_verify(output, path, deep=deep)

    @command(bench, "store")
    @click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
    @click.option(
        "--row-mib",
        "rows",
        type=click.FloatRange(min=0.01, max=1024),
        multiple=True,
        default=(7.0, 12.0),
        show_default=True,
        help="Length of a row; may be given several times.",
    )
    @click.option(
        "--size-gib",
        type=click.FloatRange(min=0.05),
        default=4.0,
        show_default=True,
        help="Length of the test pack.",
    )
    @click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True)
    @click.option(
        "--seconds",
        type=click.FloatRange(min=0, min_open=True),
        default=1.0,
        show_default=True,
        help="Length of one run.",
    )
    @click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Result file.")
    @click.option("--force", is_flag=True, help="Replace the result file if it exists.")
    def store(
        output: Output,
        folder: Path,
        rows: Sequence[float],
        size_gib: float,
        rounds: int,
        seconds: float,
        out: Path | None,
        force: bool,
    ) -> None:
        """Compare reading packs in FOLDER with fio; writes a test pack there and deletes it."""
        run_bench(output, folder, rows, size_gib, rounds, seconds, out, force=force)


def run_verify(output: Output, path: Path, *, deep: bool) -> int:
    """Check packs, print what was found and return the exit code.

    Raises:
        MoetError: there is no pack.
    """
    from moet_store import find_packs, verify_pack

    reports: list[Report] = []
    for pack in find_packs(path):
        with _bar(pack.name, "rows") as advance:
            reports.append(verify_pack(pack, deep=deep, progress=advance))
    problems = [problem for report in reports for problem in report.problems]
    rows = [
        (
            Path(report.pack).name,
            "damaged" if report.problems else "good",
            report.layers,
            f"{report.rows} read" if deep else "not read",
        )
        for report in reports
    ]
    shown = make_table("Packs", ("pack", "state", "layers", "rows"), rows)
    output.result(
        {"event": "verify", "good": not problems, "packs": reports},
        shown,
        *(problem.message for problem in problems),
    )
    return 1 if problems else 0


def run_bench(
    output: Output,
    folder: Path,
    rows: Sequence[float],
    size_gib: float,
    rounds: int,
    seconds: float,
    out: Path | None,
    *,
    force: bool,
) -> None:
    """Measure, write the result file and print it.

    Raises:
        MoetError: the result file exists and may not be replaced, or the store failed.
    """
    from moet_cli.bench import Target, result_path, run_result
    from moet_store.bench import Settings, bench_store
    from moet_store.fio import fio_version

    started = datetime.now(UTC)
    path = result_path(Target(out, force), "store", started)
    fio = fio_version()
    if fio is None:
        output.say(
            "fio is not installed: the store is compared with a plain O_DIRECT preadv loop, one "
            "row at a time. Install fio to compare it with what the drive can do."
        )
    found = []
    for mib in rows:
        settings = Settings(
            row_bytes=-(-int(mib * MIB) // 4096) * 4096,
            pack_bytes=int(size_gib * GIB),
            rounds=rounds,
            seconds=seconds,
        )
        with _bar(f"rows of {mib:g} MiB", "") as advance:
            found.append(bench_store(folder, settings, partial(_advance, advance)))
    result = run_result(
        "store",
        started,
        [m for comparison in found for m in comparison.measurements],
        versions=installed_versions() | _versions(fio),
        notes=tuple(
            f"{comparison.row_bytes / MIB:g} MiB rows: yardstick is {comparison.yardstick}; "
            f"reader: {comparison.engine}, "
            f"{'O_DIRECT' if comparison.direct else 'page cache'}, depth {comparison.depth} rows, "
            f"{comparison.fallback_count} fallbacks; {rounds} rounds of {seconds:g} s, one run of "
            "each kind a round, in random order; rows are read in random order, by the store with "
            "checksums unless the name says otherwise, by fio without; both read into huge pages "
            "and count from the submission on"
            for comparison in found
        ),
    )
    write_result(path, result, force=force)
    ratios = {f"{c.row_bytes / MIB:g} MiB": c.ratio for c in found}
    table = [
        (m.name, m.unit, *(f"{x:,.4g}" for x in (m.median, m.min, m.max)))
        for m in result.measurements
    ]
    output.result(
        {
            "event": "result",
            "file": str(path),
            "ratio_to_fio": min(ratios.values()) if fio else None,
            "ratios": ratios,
            "yardsticks": {f"{c.row_bytes / MIB:g} MiB": c.yardstick for c in found},
            "result": result,
        },
        make_table("Measured", ("what", "unit", "median", "min", "max"), table),
        f"result: {path}",
    )


def _advance(advance: Callable[[int, int], None], _what: str, share: float) -> None:
    advance(round(share * 100), 100)


def _versions(fio: str | None) -> dict[str, str]:
    names = {name: version(name) for name in ("liburing", "xxhash")}
    return names | ({"fio": fio} if fio else {})


@contextmanager
def _bar(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows done and total: a bar on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(Text(f"{what} {unit}".strip()).markup, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
