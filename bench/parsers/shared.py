"""Writes the results of this folder's scripts."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from moet_cli.bench import run_result
from moet_core.results import Measurement, write_result

__all__ = ["write"]


def write(
    path: Path,
    kind: str,
    started: datetime,
    measurements: Sequence[Measurement],
    notes: Sequence[str],
) -> None:
    """Write a result file of this folder's scripts, in the place of an older one."""
    result = run_result(kind, started, measurements, notes=tuple(notes))
    write_result(path, result, force=True)
