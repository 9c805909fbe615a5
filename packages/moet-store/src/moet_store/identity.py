"""Which checkpoint a pack was made from, in a form that survives a copy to another disk.

The identity is a SHA-256 over a digest of each file: config.json, the index, and of every shard
its size, its header and samples of its data. Times, paths and inode numbers are no part of it. The
samples tell a fine-tune from its base, whose configuration, index and headers are all the same;
reading every byte would take minutes at each start.

The digests are kept beside the packs, so that shards whose tensors are all in packs may be
deleted: what is left of the checkpoint must still be what the packs were made from.
"""

import hashlib
import struct
import uuid
from collections.abc import Mapping
from pathlib import Path

import msgspec

from moet_store.errors import PackError, PackErrorKind
from moet_store.files import io_error, read_all, replace_file

__all__ = [
    "bytes_identity",
    "checkpoint_files",
    "checkpoint_identity",
    "identity_of",
    "recorded_files",
    "write_record",
]

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format; the length is read from the file and bounds a read."""

SAMPLES = 64
SAMPLE_BYTES = 4096

RECORD_SUFFIX = ".checkpoint.json"
RECORD_VERSION = 1
MAX_RECORD_BYTES = 2**24

Files = Mapping[str, str | None]
"""File name to its digest in hexadecimal, None for a file that is not there; in order."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    files: dict[str, str]


def bytes_identity(data: bytes) -> str:
    """Return an identity for rows that come from no checkpoint, from bytes that name them."""
    return hashlib.sha256(data).hexdigest()


def checkpoint_identity(folder: Path) -> str:
    """Return the identity of the safetensors checkpoint in a folder, 64 hexadecimal digits.

    Raises:
        PackError: CHECKPOINT, a file is missing, short or no safetensors file.
    """
    files = checkpoint_files(folder)
    for name, digest in files.items():
        if digest is None:
            raise _error(folder / name, "a readable file", "none")
    return identity_of(files)


def checkpoint_files(folder: Path) -> dict[str, str | None]:
    """Return the digest of each file that belongs to a checkpoint, None for absent shards.

    Raises:
        PackError: CHECKPOINT, a file that is there is short or no safetensors file.
    """
    try:
        files: dict[str, str | None] = {CONFIG: _digest((folder / CONFIG).read_bytes())}
        for name in _shards(folder, files):
            files[name] = _shard_digest(folder / name) if (folder / name).exists() else None
    except OSError as error:
        place = Path(error.filename) if error.filename else folder
        raise _error(place, "a readable file", str(error.strerror)) from error
    return files


def identity_of(files: Files) -> str:
    """Return the identity of a checkpoint whose files all have a digest."""
    digest = hashlib.sha256(b"moet checkpoint identity 2\n")
    for name, part in files.items():
        if part is None:
            raise ValueError(f"{name} has no digest")
        digest.update(_framed(name.encode(), bytes.fromhex(part)))
    return digest.hexdigest()


def write_record(folder: Path, files: Files) -> Path:
    """Keep the digests of a checkpoint's files in a folder of packs; return the record's path.

    Raises:
        PackError: NO_SPACE or IO.
    """
    path = folder / f"{identity_of(files)[:16]}{RECORD_SUFFIX}"
    record = _Record(RECORD_VERSION, {name: part for name, part in files.items() if part})
    data = msgspec.json.encode(record) + b"\n"
    try:
        # Every rank of a model keeps the same record, and several may do so at once.
        if not _holds(path, data):
            replace_file(path, data, writer=f".{uuid.uuid4().hex}")
    except OSError as error:
        raise io_error(error, path, "write the checkpoint's record") from error
    return path


def recorded_files(folder: Path, files: Files) -> dict[str, str | None]:
    """Return `files` with the digests of absent ones, from the record that agrees on the others.

    Args:
        folder: Folder of packs.
        files: From `checkpoint_files`.

    Raises:
        PackError: CHECKPOINT, files are absent and no record agrees; IO.
    """
    absent = [name for name, digest in files.items() if digest is None]
    if not absent:
        return dict(files)
    for path in sorted(folder.glob(f"*{RECORD_SUFFIX}")):
        known = _read_record(path)
        if list(known) == list(files) and all(
            digest in (None, known[name]) for name, digest in files.items()
        ):
            return dict(known)
    raise PackError(
        PackErrorKind.CHECKPOINT,
        folder,
        wanted=f"a record of the checkpoint whose {', '.join(absent[:3])} is not there",
        found="none that agrees with the files that are there",
        advice="Download the checkpoint again, or name the folder of its packs.",
    )


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except FileNotFoundError:
        return False


def _read_record(path: Path) -> dict[str, str]:
    """Return the files of a record; one that is damaged or of another version says nothing."""
    try:
        record = msgspec.json.decode(read_all(path, MAX_RECORD_BYTES), type=_Record)
    except OSError as error:
        raise io_error(error, path, "read the checkpoint's record") from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return record.files if record.version == RECORD_VERSION else {}


def _shards(folder: Path, files: dict[str, str | None]) -> list[str]:
    """Return the names of the shards; notes the index among `files` if there is one."""
    index = folder / INDEX
    if not index.exists():
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names:
            raise _error(folder, f"{INDEX} or *.safetensors files", "neither")
        return names
    data = index.read_bytes()
    files[INDEX] = _digest(data)
    try:
        names = sorted(set(msgspec.json.decode(data, type=_Index).weight_map.values()))
    except msgspec.DecodeError as error:
        raise _error(index, "a weight_map of tensor names to shards", str(error)) from error
    for name in names:
        # The name comes from a file that anyone may have written.
        if Path(name).name != name:
            raise _error(index, "shards named without a folder", repr(name))
    return names


def _shard_digest(path: Path) -> str:
    """Digest a shard's size, header and samples of its data, evenly spaced, ends included."""
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
    return _digest(struct.pack("<Q", size), header, b"".join(samples))


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(_framed(*parts)).hexdigest()


def _framed(*parts: bytes) -> bytes:
    """Join parts so that no two different lists of them give one sequence."""
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def _error(path: Path, wanted: str, found: str) -> PackError:
    return PackError(
        PackErrorKind.CHECKPOINT,
        path,
        wanted=wanted,
        found=found,
        advice="Download the checkpoint again.",
    )
