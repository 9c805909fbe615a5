"""The manifest beside a pack: which rows are written, and the checksum of each.

    0    8  magic "MOETROWS"
    8    4  format version, 1
    12   4  number of layers
    16   4  number of experts in the file
    20   4  zero
    24   8  checksum of the pack's header: which pack this is the manifest of
    32   8  XXH3-64 of the table
    40  80  zeros
    120  8  XXH3-64 of bytes 0 to 120
    128     table [layers][experts] of entries of 16 bytes

An entry is the XXH3-64 of the row, seeded with layer * 2^32 + expert, and a check of the entry.
Both are zero in a layer that is not written. The table has a place for every row, so that damage
anywhere in it can be told by layer and expert.
"""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from moet_store.errors import PackError, PackErrorKind
from moet_store.spec import FORMAT_VERSION, PackSpec

__all__ = ["Manifest", "manifest_path", "row_digest", "row_hasher"]

MAGIC = b"MOETROWS"
HEAD_BYTES = 128
_HEAD = struct.Struct("<8sIIIIQQ")
_DIGEST_AT = HEAD_BYTES - 8
_ENTRY = struct.Struct("<IIQ")


def manifest_path(pack: Path) -> Path:
    """Return where the manifest of a pack lies."""
    return pack.with_name(f"{pack.name}.manifest")


def row_hasher(layer: int, expert: int) -> Any:
    """Start the checksum of a row; feed it with `update`, read it with `intdigest`.

    The place is part of the checksum: a good row at another row's place is a damaged one.
    """
    return xxhash.xxh3_64(seed=layer << 32 | expert)


def row_digest(row: Any, layer: int, expert: int) -> int:
    """Return the checksum of a whole row."""
    return xxhash.xxh3_64_intdigest(row, layer << 32 | expert)


class Manifest:
    """The checksums of a pack's rows; `table` is uint64 [layers, held experts, 2]."""

    def __init__(self, spec: PackSpec, pack_digest: int, table: NDArray[np.uint64]) -> None:
        self.spec = spec
        self.pack_digest = pack_digest
        self._table = table

    @classmethod
    def empty(cls, spec: PackSpec, pack_digest: int) -> "Manifest":
        """Make the manifest of a pack of which nothing is written."""
        shape = (len(spec.layers), len(spec.held), 2)
        return cls(spec, pack_digest, np.zeros(shape, dtype="<u8"))

    @classmethod
    def decode(cls, data: bytes, spec: PackSpec, pack_digest: int, path: Path) -> "Manifest":
        """Read a manifest, strictly.

        Args:
            data: The whole file.
            spec: The specification in the pack's header.
            pack_digest: The checksum of that header.
            path: The manifest's file, for errors.

        Raises:
            PackError: MANIFEST_DAMAGED, with layer and expert where the damage is in an entry;
                VERSION; WRONG_SIZE; OTHER_PACK.
        """
        manifest = cls.empty(spec, pack_digest)
        _check_head(data, manifest, path)
        table = np.frombuffer(data, dtype="<u8", offset=HEAD_BYTES)
        manifest._table[:] = table.reshape(manifest._table.shape)
        if _table_digest(data) != xxhash.xxh3_64_intdigest(data[HEAD_BYTES:]):
            manifest._find_damage(path)
        return manifest

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        table = self._table.tobytes()
        layers, held, _ = self._table.shape
        digest = xxhash.xxh3_64_intdigest(table)
        head = _HEAD.pack(MAGIC, FORMAT_VERSION, layers, held, 0, self.pack_digest, digest)
        head = head.ljust(_DIGEST_AT, b"\0")
        return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + table

    @property
    def written(self) -> tuple[int, ...]:
        """The model layers whose rows are all there."""
        whole = [bool(entries.any()) for entries in self._table]
        return tuple(layer for layer, done in zip(self.spec.layers, whole, strict=True) if done)

    def digest(self, layer: int, expert: int) -> int | None:
        """Return the checksum of a row of this file, None if its layer is not written."""
        place = self.spec.layers.index(layer), expert // self.spec.stripes
        digest, check = self._table[place].tolist()
        return digest if digest or check else None

    def set_layer(self, layer: int, digests: Sequence[int]) -> None:
        """Record the checksums of all rows of a layer, in file order."""
        pairs = zip(self.spec.held, digests, strict=True)
        entries = [(digest, self._check(layer, expert, digest)) for expert, digest in pairs]
        self._table[self.spec.layers.index(layer)] = entries

    def forget_layer(self, layer: int) -> None:
        """Record that a layer is not written."""
        self._table[self.spec.layers.index(layer)] = 0

    def _check(self, layer: int, expert: int, digest: int) -> int:
        return xxhash.xxh3_64_intdigest(_ENTRY.pack(layer, expert, digest), self.pack_digest)

    def _find_damage(self, path: Path) -> None:
        for layer, entries in zip(self.spec.layers, self._table.tolist(), strict=True):
            # A written row never has two zeros for its entry, so one such tells the whole layer.
            unwritten = [0, 0] in entries
            for expert, (digest, check) in zip(self.spec.held, entries, strict=True):
                wanted = 0 if unwritten else self._check(layer, expert, digest)
                if check != wanted or (unwritten and digest):
                    raise _damaged(
                        path, f"check {wanted:016x}", f"{digest:016x} {check:016x}", layer, expert
                    )
        raise _damaged(path, "the checksum of the table", "another, though every entry is whole")


def _check_head(data: bytes, manifest: Manifest, path: Path) -> None:
    spec = manifest.spec
    if data[: len(MAGIC)] != MAGIC:
        raise _damaged(path, f"a file that begins with {MAGIC!r}", repr(data[: len(MAGIC)]))
    size = HEAD_BYTES + 16 * len(spec.layers) * len(spec.held)
    if len(data) != size:
        raise PackError(
            PackErrorKind.WRONG_SIZE,
            path,
            wanted=f"{size} bytes for {len(spec.layers)} layers of {len(spec.held)} experts",
            found=f"{len(data)}",
            advice=ADVICE,
        )
    _, version, layers, held, zero, pack_digest, _ = _HEAD.unpack_from(data)
    if version != FORMAT_VERSION:
        raise PackError(
            PackErrorKind.VERSION,
            path,
            wanted=f"format version {FORMAT_VERSION}",
            found=f"{version}",
            advice="Read it with the release that wrote it.",
            field="version",
        )
    digest = xxhash.xxh3_64_intdigest(data[:_DIGEST_AT])
    stored = struct.unpack_from("<Q", data, _DIGEST_AT)[0]
    if digest != stored:
        raise _damaged(path, f"checksum {stored:016x}", f"{digest:016x}")
    if pack_digest != manifest.pack_digest:
        raise PackError(
            PackErrorKind.OTHER_PACK,
            path,
            wanted=f"the manifest of the pack with header {manifest.pack_digest:016x}",
            found=f"that of {pack_digest:016x}",
            advice="Copy pack and manifest together.",
            field="header",
        )
    if (layers, held, zero) != (len(spec.layers), len(spec.held), 0) or any(data[40:_DIGEST_AT]):
        raise _damaged(path, "the pack's geometry and zeros behind it", "other bytes")


ADVICE = "Copy the file again, or open the pack for writing to resume it."


def _table_digest(data: bytes) -> int:
    return int(struct.unpack_from("<Q", data, 32)[0])


def _damaged(
    path: Path, wanted: str, found: str, layer: int | None = None, expert: int | None = None
) -> PackError:
    return PackError(
        PackErrorKind.MANIFEST_DAMAGED,
        path,
        wanted=wanted,
        found=found,
        advice=ADVICE,
        layer=layer,
        expert=expert,
    )
