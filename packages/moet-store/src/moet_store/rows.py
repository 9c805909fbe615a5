"""The state of rows that are being read."""

from typing import Any

import msgspec

from moet_core.row import ROW_ALIGNMENT
from moet_store.direct import PackFile
from moet_store.errors import PackError, PackErrorKind
from moet_store.manifest import row_hasher
from moet_store.memory import address_of

__all__ = ["Completion", "Key", "Row", "row_buffer"]

Key = tuple[int, int]
"""Model layer and expert."""


class Completion(msgspec.Struct, frozen=True):
    """A read that ended: the row is in its destination, whole and verified, unless `error`."""

    ticket: int
    key: Key
    error: PackError | None = None


class Row:
    """A row under way.

    Attributes:
        files: Those not yet tried, the current one first.
        arrived: Bytes from the row's start that are in `buffer`.
        stop: Where the request that reads the next ones ends.
        hashed: Bytes from the row's start that are part of the checksum.
        attempts: Requests in a row that brought nothing.
    """

    __slots__ = (
        "arrived",
        "attempts",
        "buffer",
        "error",
        "files",
        "hashed",
        "hasher",
        "key",
        "prefetch",
        "started",
        "stop",
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
        self.arrived = self.stop = self.hashed = self.attempts = 0
        self.error: PackError | None = None

    def hash_stretch(self, most: int, verify: bool) -> None:
        """Take the checksum up to `most` bytes further into what has arrived."""
        stop = min(self.hashed + most, self.arrived) if verify else self.arrived
        if verify:
            self.hasher.update(self.buffer[self.hashed : stop])
        self.hashed = stop

    def matches(self) -> bool:
        """Compare the checksum of the whole row with the manifest's; `error` says what differs."""
        digest = self.hasher.intdigest()
        if digest == self.wanted:
            return True
        wanted, found = f"checksum {self.wanted:016x}", f"{digest:016x}"
        advice = "Write the layer again; moet pack verify --deep names every bad row."
        self.error = self.failure(PackErrorKind.ROW_DAMAGED, wanted, found, advice)
        return False

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


def row_buffer(buffer: Any, row_bytes: int, key: Key) -> memoryview:
    """Return memory that a row can be read into, as bytes.

    Raises:
        PackError: BUFFER, a row cannot be read into it.
    """
    data = memoryview(buffer).cast("B")
    length, readonly = len(data), data.readonly
    if length != row_bytes or readonly or address_of(data) % ROW_ALIGNMENT:
        raise PackError(
            PackErrorKind.BUFFER,
            None,
            wanted=f"{row_bytes} writable bytes that start on a page",
            found=f"{length} {'read-only ' if readonly else ''}bytes at {address_of(data):#x}",
            advice="Take them from moet_store.aligned_buffer.",
            layer=key[0],
            expert=key[1],
        )
    return data
