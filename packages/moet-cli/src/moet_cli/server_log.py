"""Follows a server's log file: whole lines as they come, and the errors worth quoting."""

import re
from collections.abc import Sequence
from pathlib import Path

__all__ = ["LogFollower", "error_lines"]

_LINE_END = re.compile(rb"[\r\n]+")  # progress bars end their lines with a carriage return
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_BELOW_ERROR = re.compile(r"\b(?:DEBUG|INFO|WARNING)\b")  # these may quote errors as examples
_EXCEPTION = re.compile(r"\b[\w.]*(?:Error|Exception|Interrupt|Exit): .+")
_ERROR = re.compile(r"\b(?:ERROR|CRITICAL|FATAL|Killed)\b|\berror:")


class LogFollower:
    """Reads what was added to a file since the last time."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._rest = b""

    def lines(self) -> list[str]:
        """Return the lines completed since the last call, without colours and empty lines."""
        *complete, self._rest = _LINE_END.split(self._rest + self._file.read())
        texts = [_COLOUR.sub("", line.decode(errors="replace")) for line in complete]
        return [text for text in texts if text.strip()]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def error_lines(lines: Sequence[str], most: int = 6) -> list[str]:
    """Pick the lines that say what went wrong.

    These are distinct exception messages if there are any, else lines that a logger marked as
    errors, else the last lines; the first and the last ones if there are more than `most`: the
    cause comes first, and what it led to last.
    """
    lines = [line for line in lines if not _BELOW_ERROR.search(line)] or list(lines)
    exceptions = [found.group() for line in lines if (found := _EXCEPTION.search(line))]
    errors = [line for line in lines if _ERROR.search(line)]
    picked = list(dict.fromkeys(exceptions or errors)) or lines[-most:]
    if len(picked) > most:
        picked = picked[: most // 2] + picked[-(most - most // 2) :]
    return picked
