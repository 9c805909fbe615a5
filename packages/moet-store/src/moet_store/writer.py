"""Writes packs: layer by layer, resumable, safe against crashes at any instruction.

Rows are written and synced before the manifest names their layer; the manifest is replaced in one
step. Whatever stops a writer, the pack then holds the finished layers and can be resumed.
"""

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from moet_store.errors import PackError, PackErrorKind
from moet_store.files import free_bytes, io_error, locked, replace_file, sync_folder, write_at
from moet_store.manifest import Manifest, manifest_path, row_digest
from moet_store.pack import pack_path, read_header, read_manifest
from moet_store.spec import HEADER_BYTES, PackSpec, check_same, encode_header, header_digest

__all__ = ["PackWriter", "Progress", "StripedWriter"]

# Lock positions in the lock file: one byte a layer, and one for pack and manifest as a whole.
_MERGE_LOCK = 2**40


class Progress(msgspec.Struct, frozen=True):
    """How far a layer is; `rows` of `of` rows are handed to the kernel."""

    layer: int
    rows: int
    of: int


class PackWriter:
    """Writes the layers of one pack; several may write different layers at the same time.

    Args:
        folder: Where the pack lies or will lie; it must exist.
        spec: What the pack is.
        progress: Called after every row.

    Raises:
        PackError: SPEC_INVALID; NO_SPACE before anything is written; OTHER_PACK and other errors
            of a file of this name that is not this pack; IO.
    """

    def __init__(
        self,
        folder: Path,
        spec: PackSpec,
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self.spec = spec
        self.path = pack_path(folder, spec)
        self.progress = progress
        self._header = encode_header(spec)
        self._digest = header_digest(self._header)
        self._lock = _open(self.path.with_name(f"{self.path.name}.lock"), os.O_RDWR | os.O_CREAT)
        self._file = -1
        try:
            with locked(self._lock, _MERGE_LOCK, wait=True):
                self._prepare()
        except OSError as error:
            self.close()
            raise io_error(error, self.path, "prepare the pack") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def missing(self) -> tuple[int, ...]:
        """The model layers that no writer has finished, as the manifest says now."""
        written = self._manifest().written
        return tuple(layer for layer in self.spec.layers if layer not in written)

    def write_layer(self, layer: int, rows: Iterable[Any]) -> bool:
        """Write all rows of a layer and name it in the manifest.

        Args:
            layer: Model index of the layer.
            rows: Buffers of payload_bytes or row_bytes, one for each expert of this file, in
                order; read one at a time.

        Returns:
            False if the layer was there already; `rows` is then not touched.

        Raises:
            PackError: ROW_MISSING (no such layer), ROW_INVALID, LAYER_BUSY, NO_SPACE or IO. The
                layer is then not named and can be written again.
        """
        start = self.spec.offset(layer, self.spec.stripe)
        try:
            with locked(self._lock, self.spec.layers.index(layer), wait=False) as mine:
                if not mine:
                    raise self._error(
                        PackErrorKind.LAYER_BUSY,
                        layer,
                        "a layer that nobody writes",
                        "another writer at work",
                        "Write another layer, and this one later.",
                    )
                if layer in self._manifest().written:
                    return False
                self._reserve(start)
                digests = self._write_rows(layer, start, rows)
                os.fdatasync(self._file)
                self._publish(layer, digests)
        except OSError as error:
            raise io_error(error, self.path, f"write layer {layer}") from error
        return True

    def close(self) -> None:
        """Close the files; what is not named in the manifest by now is not written."""
        for fd in (self._file, self._lock):
            if fd >= 0:
                os.close(fd)
        self._file = self._lock = -1

    def _prepare(self) -> None:
        """Make the pack, or check and mend the one that is there."""
        if not self.path.exists() or self._is_beginning():
            manifest_path(self.path).unlink(missing_ok=True)
            self._check_space(Manifest.empty(self.spec, self._digest))
            self._create()
        check_same(self.spec, read_header(self.path)[0], self.path)
        self._file = _open(self.path, os.O_RDWR)
        manifest = self._recover_manifest()
        self._mend(manifest)
        self._check_space(manifest)

    def _is_beginning(self) -> bool:
        """Tell whether the file is this pack's header cut short, which nobody needs."""
        size = self.path.stat().st_size
        return size < HEADER_BYTES and self._header.startswith(self.path.read_bytes())

    def _create(self) -> None:
        draft = self.path.with_name(f"{self.path.name}.new")
        fd = _open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_at(fd, memoryview(self._header), 0)
            os.ftruncate(fd, self.spec.file_bytes)
            os.fsync(fd)
        finally:
            os.close(fd)
        draft.replace(self.path)
        sync_folder(self.path.parent)

    def _recover_manifest(self) -> Manifest:
        """Return the manifest; one that is missing or spoilt names no layer."""
        path = manifest_path(self.path)
        try:
            return read_manifest(self.path, self.spec, self._digest)
        except PackError as error:
            spoilt = (
                PackErrorKind.MANIFEST_MISSING,
                PackErrorKind.MANIFEST_DAMAGED,
                PackErrorKind.WRONG_SIZE,
            )
            if error.kind not in spoilt:
                raise
        manifest = Manifest.empty(self.spec, self._digest)
        replace_file(path, manifest.encode())
        return manifest

    def _mend(self, manifest: Manifest) -> None:
        """Forget the layers that a truncated file lost, and give it its length again."""
        size = os.fstat(self._file).st_size
        if size == self.spec.file_bytes:
            return
        for layer in manifest.written:
            if self.spec.offset(layer, self.spec.stripe) + self.spec.layer_bytes > size:
                manifest.forget_layer(layer)
        # The manifest first: a longer file must never have a layer of zeros named.
        replace_file(manifest_path(self.path), manifest.encode())
        os.ftruncate(self._file, self.spec.file_bytes)
        os.fsync(self._file)

    def _check_space(self, manifest: Manifest) -> None:
        missing = len(self.spec.layers) - len(manifest.written)
        allocated = self.path.stat().st_blocks * 512 if self.path.exists() else 0
        kept = len(manifest.written) * self.spec.layer_bytes
        needed = missing * self.spec.layer_bytes - max(0, allocated - kept)
        free = free_bytes(self.path.parent)
        if needed > free:
            raise PackError(
                PackErrorKind.NO_SPACE,
                self.path,
                wanted=f"{needed:,} bytes for {missing} layers",
                found=f"{free:,} free",
                advice="Make room or choose another folder; nothing was written.",
            )

    def _manifest(self) -> Manifest:
        return read_manifest(self.path, self.spec, self._digest)

    def _reserve(self, start: int) -> None:
        """Have the file system find the room of a layer before any of it is written."""
        try:
            os.posix_fallocate(self._file, start, self.spec.layer_bytes)
        except OSError as error:
            # Not every file system can; the writes themselves then say when it is full.
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise

    def _write_rows(self, layer: int, start: int, rows: Iterable[Any]) -> list[int]:
        held, row_bytes = self.spec.held, self.spec.row_bytes
        digests: list[int] = []
        for row in rows:
            data = self._padded(layer, len(digests), row)
            digests.append(row_digest(data, layer, held[len(digests)]))
            write_at(self._file, data, start + (len(digests) - 1) * row_bytes)
            self.progress(Progress(layer, len(digests), len(held)))
        if len(digests) < len(held):
            raise self._error(
                PackErrorKind.ROW_INVALID, layer, f"{len(held)} rows", f"{len(digests)}"
            )
        return digests

    def _padded(self, layer: int, number: int, row: Any) -> memoryview:
        held = self.spec.held
        if number >= len(held):
            raise self._error(PackErrorKind.ROW_INVALID, layer, f"{len(held)} rows", "more")
        data = memoryview(row).cast("B")
        if len(data) == self.spec.row_bytes:
            return data
        if len(data) != self.spec.payload_bytes:
            wanted = f"{self.spec.payload_bytes} bytes, or {self.spec.row_bytes} with padding"
            raise PackError(
                PackErrorKind.ROW_INVALID,
                self.path,
                wanted=wanted,
                found=f"{len(data)}",
                layer=layer,
                expert=held[number],
            )
        return memoryview(bytes(data).ljust(self.spec.row_bytes, b"\0"))

    def _publish(self, layer: int, digests: Sequence[int]) -> None:
        """Name a layer, among those that other writers have named meanwhile."""
        with locked(self._lock, _MERGE_LOCK, wait=True):
            if not os.path.samestat(os.fstat(self._file), self.path.stat()):
                raise self._error(
                    PackErrorKind.IO, layer, "the pack that was opened", "another file in its place"
                )
            manifest = self._manifest()
            manifest.set_layer(layer, digests)
            replace_file(manifest_path(self.path), manifest.encode())

    def _error(
        self, kind: PackErrorKind, layer: int, wanted: str, found: str, advice: str = ""
    ) -> PackError:
        return PackError(kind, self.path, wanted=wanted, found=found, advice=advice, layer=layer)


class StripedWriter:
    """Writes one pack a folder, the experts dealt out in turn; for several drives.

    Args:
        folders: One folder a stripe.
        spec: What the packs are together: stripe 0 of 1.
        progress: As for `PackWriter`; rows count within one stripe.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        spec: PackSpec,
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self.writers: list[PackWriter] = []
        try:
            for stripe, folder in enumerate(folders):
                part = spec.striped(stripe, len(folders))
                self.writers.append(PackWriter(folder, part, progress))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def missing(self) -> tuple[int, ...]:
        """The model layers that are not finished in every stripe."""
        missing = {layer for writer in self.writers for layer in writer.missing}
        return tuple(sorted(missing))

    def write_layer(self, layer: int, rows: Sequence[Any]) -> bool:
        """Write all rows of a layer, expert e to stripe e modulo the number of stripes.

        Returns:
            False if every stripe had the layer already.

        Raises:
            PackError: As `PackWriter.write_layer`.
        """
        count = len(self.writers)
        written = [
            writer.write_layer(layer, rows[stripe::count])
            for stripe, writer in enumerate(self.writers)
        ]
        return any(written)

    def close(self) -> None:
        """Close the files of all stripes."""
        for writer in self.writers:
            writer.close()


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise io_error(error, path, "open the file") from error
