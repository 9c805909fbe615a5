"""Writes the results of this folder's scripts."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from moet_cli.machine import describe_machine, find_commit, installed_versions
from moet_core.results import Measurement, Result, recorded_command, write_result

__all__ = ["write"]


def write(
    path: Path,
    kind: str,
    started: datetime,
    measurements: Sequence[Measurement],
    notes: Sequence[str],
) -> None:
    """Write a result file of this folder's scripts, in the place of an older one."""
    result = Result(
        kind=kind,
        started=started,
        finished=datetime.now(UTC),
        commit=find_commit(),
        versions=installed_versions(),
        machine=describe_machine(),
        command=recorded_command(sys.argv),
        measurements=tuple(measurements),
        notes=tuple(notes),
    )
    write_result(path, result, force=True)
