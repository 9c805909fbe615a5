"""A pack file that is open for reading, past the page cache where its file system can."""

import errno
import os

from moet_store.counters import Counters
from moet_store.engines import report_fallback
from moet_store.errors import PackError, PackErrorKind
from moet_store.files import io_error
from moet_store.memory import aligned_buffer
from moet_store.pack import Pack
from moet_store.spec import HEADER_BYTES, header_digest

__all__ = ["PackFile"]

REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


class PackFile:
    """An open pack.

    Attributes:
        pack: What it holds.
        fd: Where to read it now.
        direct: Whether reads go past the page cache.
        load: Rows that are being read from it.
    """

    def __init__(self, pack: Pack, direct: bool, counters: Counters) -> None:
        self.pack = pack
        self.load = 0
        self.direct = False
        self._counters = counters
        self._opened: list[int] = []
        try:
            self._open(direct)
            self._check_header()
        except OSError as error:
            self.close()
            raise io_error(error, pack.path, "read the header") from error
        except BaseException:
            self.close()
            raise

    @property
    def fd(self) -> int:
        """The descriptor to read from."""
        return self._opened[-1]

    @property
    def can_fall_back(self) -> bool:
        """Whether reads can still be tried through the page cache."""
        # Reads that were under way at a fallback may fail like the first one did.
        return self.direct or len(self._opened) > 1

    def fall_back(self, why: str) -> None:
        """Read through the page cache from now on."""
        if not self.direct:
            return
        self.direct = False
        # Reads of the old descriptor may be under way: it is closed with the file.
        self._opened.append(os.open(self.pack.path, os.O_RDONLY | os.O_CLOEXEC))
        self._report(why)

    def close(self) -> None:
        """Close the file."""
        for fd in self._opened:
            os.close(fd)
        self._opened.clear()

    def _open(self, direct: bool) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC
        if direct:
            try:
                self._opened.append(os.open(self.pack.path, flags | os.O_DIRECT))
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise
                self._report(os.strerror(error.errno))
            else:
                self.direct = True
                return
        self._opened.append(os.open(self.pack.path, flags))

    def _check_header(self) -> None:
        """Read one page the way rows will be read: that the file opened proves nothing yet."""
        page = aligned_buffer(HEADER_BYTES)
        try:
            count = os.preadv(self.fd, [page], 0)
        except OSError as error:
            if not self.direct or error.errno not in REFUSALS:
                raise
            self.fall_back(os.strerror(error.errno))
            count = os.preadv(self.fd, [page], 0)
        if count != HEADER_BYTES or header_digest(bytes(page)) != self.pack.digest:
            raise PackError(
                PackErrorKind.OTHER_PACK,
                self.pack.path,
                wanted=f"the file whose header is {self.pack.digest:016x}",
                found="another in its place",
                advice="Open it again when nobody replaces it.",
                field="header",
            )

    def _report(self, why: str) -> None:
        what = f"{self.pack.path} is read through the page cache: O_DIRECT does not work there"
        advice = "put packs on ext4 or xfs on a drive of this machine for full speed"
        report_fallback(self._counters, what, why, advice)
