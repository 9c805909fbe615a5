"""The state of rows that are being read."""

import msgspec

from moet_store.direct import PackFile
from moet_store.errors import PackError, PackErrorKind
from moet_store.manifest import row_hasher

__all__ = ["Completion", "Key", "Piece", "Row"]

Key = tuple[int, int]
"""Model layer and expert."""


class Completion(msgspec.Struct, frozen=True):
    """A read that ended: the row is in its destination, whole and verified, unless `error`."""

    ticket: int
    key: Key
    error: PackError | None = None


class Row:
    """A row under way; `files` are those not yet tried, the current one first."""

    __slots__ = (
        "arrived",
        "buffer",
        "error",
        "files",
        "hashed",
        "hasher",
        "in_flight",
        "key",
        "prefetch",
        "started",
        "ticket",
        "wanted",
    )

    def __init__(self, key: Key, buffer: memoryview, files: list[PackFile]) -> None:
        self.ticket = -1
        self.key = key
        self.buffer = buffer
        self.files = files
        self.prefetch = False
        self.started: float | None = None
        self.restart()

    def restart(self) -> None:
        """Forget what has arrived: the row is read from the first of `files`."""
        self.wanted = self.files[0].pack.manifest.digest(*self.key)
        self.hasher = row_hasher(*self.key)
        self.arrived: dict[int, int] = {}
        self.hashed = 0
        self.in_flight = 0
        self.error: PackError | None = None

    def failure(self, kind: PackErrorKind, wanted: str, found: str, advice: str) -> PackError:
        """Say what is wrong with the row in the file that it is read from."""
        layer, expert = self.key
        return PackError(
            kind,
            self.files[0].pack.path,
            wanted=wanted,
            found=found,
            advice=advice,
            layer=layer,
            expert=expert,
        )


class Piece:
    """Bytes `at` to `stop` of a row that are still to be read."""

    __slots__ = ("at", "attempts", "file", "row", "start", "stop")

    def __init__(self, row: Row, start: int, stop: int) -> None:
        self.row = row
        self.file = row.files[0]
        self.start = self.at = start
        self.stop = stop
        self.attempts = 0
