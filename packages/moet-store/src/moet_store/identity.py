"""Which checkpoint a pack was made from, in a form that survives a copy to another disk.

The identity is a SHA-256 over config.json, the index and, of every shard, its name, its size, its
header and samples of its data. Times, paths and inode numbers are no part of it. The samples tell
a fine-tune from its base, whose configuration, index and headers are all the same; reading every
byte would take minutes at each start.
"""

import hashlib
import struct
from pathlib import Path

import msgspec

from moet_store.errors import PackError, PackErrorKind

__all__ = ["bytes_identity", "checkpoint_identity"]

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format; the length is read from the file and bounds a read."""

SAMPLES = 64
SAMPLE_BYTES = 4096


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def bytes_identity(data: bytes) -> str:
    """Return an identity for rows that come from no checkpoint, from bytes that name them."""
    return hashlib.sha256(data).hexdigest()


def checkpoint_identity(folder: Path) -> str:
    """Return the identity of the safetensors checkpoint in a folder, 64 hexadecimal digits.

    Raises:
        PackError: CHECKPOINT, a file is missing, short or no safetensors file.
    """
    digest = hashlib.sha256(b"moet checkpoint identity 1\n")
    try:
        _add(digest, CONFIG, (folder / CONFIG).read_bytes())
        names = _shards(folder, digest)
        for name in names:
            path = folder / name
            _add(digest, name, struct.pack("<Q", path.stat().st_size), *_parts(path))
    except OSError as error:
        place = Path(error.filename) if error.filename else folder
        raise _error(place, "a readable file", str(error.strerror)) from error
    return digest.hexdigest()


def _shards(folder: Path, digest: "hashlib._Hash") -> list[str]:
    index = folder / INDEX
    if not index.exists():
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names:
            raise _error(folder, f"{INDEX} or *.safetensors files", "neither")
        return names
    data = index.read_bytes()
    _add(digest, INDEX, data)
    try:
        names = sorted(set(msgspec.json.decode(data, type=_Index).weight_map.values()))
    except msgspec.DecodeError as error:
        raise _error(index, "a weight_map of tensor names to shards", str(error)) from error
    for name in names:
        # The name comes from a file that anyone may have written.
        if Path(name).name != name:
            raise _error(index, "shards named without a folder", repr(name))
    return names


def _parts(path: Path) -> tuple[bytes, ...]:
    """Return a shard's header and samples of its data, evenly spaced, first and last included."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if prefix == b"version ":
            raise _error(path, "a safetensors file", "a git-lfs pointer; run git lfs pull")
        if len(prefix) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise _error(path, "a safetensors header inside the file", f"one of {length} bytes")
        header = file.read(length)
        last = max(size - 8 - length - SAMPLE_BYTES, 0)
        samples = []
        for number in range(SAMPLES):
            file.seek(8 + length + last * number // (SAMPLES - 1))
            samples.append(file.read(SAMPLE_BYTES))
    return header, b"".join(samples)


def _add(digest: "hashlib._Hash", name: str, *parts: bytes) -> None:
    """Add named bytes so that no two different lists of them give one sequence."""
    for part in (name.encode(), *parts):
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)


def _error(path: Path, wanted: str, found: str) -> PackError:
    return PackError(
        PackErrorKind.CHECKPOINT,
        path,
        wanted=wanted,
        found=found,
        advice="Download the checkpoint again.",
    )
