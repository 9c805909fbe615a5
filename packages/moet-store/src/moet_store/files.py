"""Files that survive a crash: whole writes, synced, replaced in one step, locked by range."""

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moet_store.errors import PackError, PackErrorKind

__all__ = [
    "free_bytes",
    "io_error",
    "locked",
    "read_all",
    "replace_file",
    "sync_folder",
    "write_at",
]

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def io_error(error: OSError, path: Path, doing: str) -> PackError:
    """Turn what the operating system said into the error of packs."""
    full = error.errno in NO_SPACE
    return PackError(
        PackErrorKind.NO_SPACE if full else PackErrorKind.IO,
        path,
        wanted=f"to {doing}",
        found=os.strerror(error.errno or 0),
        advice=(
            "Make room and write again: finished layers are kept."
            if full
            else "See the kernel's log; finished layers are kept."
        ),
    )


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data`; the kernel may take it in parts.

    Raises:
        OSError: What the kernel answered; a write that makes no progress is EIO.
    """
    while data:
        count = os.pwrite(fd, data, offset)
        if count <= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        data, offset = data[count:], offset + count


def read_all(path: Path, limit: int) -> bytes:
    """Read a file of `limit` bytes or fewer; of a longer one, the first `limit` + 1.

    Raises:
        OSError: It cannot be read.
    """
    parts, left = [], limit + 1
    with path.open("rb", buffering=0) as file:
        # One read can return fewer bytes than there are.
        while left and (part := file.read(left)):
            parts.append(part)
            left -= len(part)
    return b"".join(parts)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes, *, writer: str = "") -> None:
    """Put a file in place in one step: a crash leaves the old one or the new one, whole.

    Args:
        path: The file.
        data: Its content.
        writer: Tells writers apart that may replace the file at the same time, for the draft's
            name; empty where the caller holds the lock that makes it the only one.

    Raises:
        OSError: What the kernel answered; the old file is still there.
    """
    draft = path.with_name(f"{path.name}{writer}.new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_at(fd, memoryview(data), 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    draft.replace(path)
    sync_folder(path.parent)


def free_bytes(folder: Path) -> int:
    """Return the room that this process may still fill on a folder's file system."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


@contextmanager
def locked(fd: int, position: int, *, wait: bool) -> Iterator[bool]:
    """Hold the lock on one byte of an open file; yields False if it is taken and `wait` is not set.

    The lock belongs to the open file description: threads exclude each other like processes do,
    and it goes with the last of its descriptors, so that a killed writer leaves none behind.
    """
    command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
    try:
        fcntl.fcntl(fd, command, _flock(fcntl.F_WRLCK, position))
    except OSError as error:
        if wait or error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        yield False
        return
    try:
        yield True
    finally:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, position))


def _flock(kind: int, position: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, position, 1, 0)
