"""Lets a script say when the phases of a run begin, by empty files in a folder.

Several runs can so share a GPU: one starts its engines' processes while another measures, loads
its models when that has ended, and measures when nothing else moves.
"""

import time
from pathlib import Path

__all__ = ["reach", "wait_for"]

POLL_SECONDS = 0.1


def wait_for(folder: Path | None, step: str) -> None:
    """Wait until the file `step` is there; without a folder nothing is waited for."""
    while folder is not None and not (folder / step).exists():
        time.sleep(POLL_SECONDS)


def reach(folder: Path | None, step: str) -> None:
    """Say that a step is reached."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / step).touch()
