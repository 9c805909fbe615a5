"""Work that may crash or hang: each task in a process of its own, its rows as lines of JSON."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Clock", "Row", "crashed_at", "run_task", "serve_task"]

Row = dict[str, Any]
_OK, _CRASHED, _HUNG, _LATE = "ok", "crashed", "hung", "no time left"


class Clock:
    """Seconds that are left of the whole run."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until the run must end."""
        return self._end - time.monotonic()


def run_task(bundle: Path, name: str, arguments: list, clock: Clock, seconds: float) -> Row:
    """Run a task in a process of its own.

    Args:
        bundle: the folder that the task works on.
        name: which task, see `moet_kernels.sass.gpu.tasks`.
        arguments: what JSON can hold.
        clock: of the whole run.
        seconds: after which the task counts as hung.

    Returns:
        {"outcome": ok, crashed, hung or no time left; "rows": what it yielded until then;
        "error": what it said in the end, where it crashed}.
    """
    seconds = min(seconds, clock.left())
    if seconds <= 0:
        return {"outcome": _LATE, "rows": [], "error": None}
    command = [sys.executable, "-m", "moet_kernels.sass.gpu", "--task", str(bundle), name]
    process = subprocess.Popen(
        [*command, json.dumps(arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said, complaint = process.communicate(timeout=seconds)
        outcome = _CRASHED if process.returncode else _OK
    except subprocess.TimeoutExpired:
        process.kill()
        said, complaint = process.communicate()
        outcome = _HUNG if clock.left() > 0 else _LATE
    rows = [json.loads(line) for line in said.splitlines()]
    error = complaint.strip().splitlines()[-1:] if outcome == _CRASHED else []
    return {"outcome": outcome, "rows": rows, "error": error[0] if error else None}


def crashed_at(found: Row) -> Any:
    """What the task had begun but not done when it ended: the last row's "begun", or None."""
    last = found["rows"][-1] if found["rows"] else {}
    return last.get("begun") if found["outcome"] != _OK else None


def serve_task(rows: Iterator[Row]) -> None:
    """Print the rows of a task as they come; called in the task's process."""
    for row in rows:
        print(json.dumps(row), flush=True)  # noqa: T201
