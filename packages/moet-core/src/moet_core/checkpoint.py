"""Is a downloaded checkpoint whole? Reads every header of its safetensors files, no tensor data.

A file is an 8-byte little-endian header length, that many bytes of JSON (name -> dtype, shape,
data_offsets), then the data. Truncated downloads are common and fail late and strangely
elsewhere: here each file must be exactly as long as its header says.
"""

import re
import struct
from collections.abc import Container, Iterable
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from moet_core.errors import ConfigError, TensorError

__all__ = ["MAX_HEADER_BYTES", "CheckpointInfo", "TensorEntry", "check_checkpoint", "read_header"]

MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's own bound; the length comes off the disk and must not size a read."""

_MAX_JSON_BYTES = 256 * 2**20
"""Bound on config.json and the index: 200 bytes for each of a million tensors."""

_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}

_SHARD_NAME = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor's header entry; `data_offsets` count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class CheckpointInfo(msgspec.Struct, frozen=True):
    """A complete checkpoint.

    Attributes:
        tensors: Number of tensors.
        total_bytes: Bytes of tensor data.
        shards: Names of its safetensors files, sorted.
        source_format: What its routed experts are stored as, "bf16", "fp16", "fp32", "fp8",
            "mxfp4" or "nvfp4"; None where that cannot be told.
    """

    tensors: int
    total_bytes: int
    shards: tuple[str, ...]
    source_format: str | None


def check_checkpoint(path: str | Path, absent: Container[str] = ()) -> CheckpointInfo:
    """Check that a checkpoint's folder has all its files, each of the length it must have.

    Args:
        path: A folder with config.json and model*.safetensors, in the Hugging Face layout.
        absent: Names of shards that may be missing, because what they held is kept elsewhere; they
            do not count in the result.

    Raises:
        ConfigError: Something is missing, too short or too long, or not readable as what it is.
        TensorError: A tensor's header entry contradicts itself.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"There is no checkpoint folder {folder}.")
    _read_json(folder / "config.json", dict[str, Any])
    index = folder / "model.safetensors.index.json"
    placed = _read_json(index, _Index).weight_map if index.is_file() else None
    shards = sorted(set(placed.values())) if placed is not None else _find_shards(folder)
    shards = [shard for shard in shards if shard not in absent or (folder / shard).is_file()]
    for shard in shards:
        _check_present(folder, shard)
    headers = {shard: read_header(folder / shard) for shard in shards}
    if placed is not None:
        for tensor, shard in placed.items():
            if shard in headers and tensor not in headers[shard]:
                raise ConfigError(
                    f"{index} places tensor {tensor!r} in {shard}, which does not contain it. "
                    "Index and files are of different checkpoints; download them again together."
                )
    entries = [(name, entry) for header in headers.values() for name, entry in header.items()]
    return CheckpointInfo(
        tensors=len(entries),
        total_bytes=sum(entry.data_offsets[1] - entry.data_offsets[0] for _, entry in entries),
        shards=tuple(shards),
        source_format=_source_format(entries),
    )


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return the header of a safetensors file and check the file's length against it.

    Raises:
        ConfigError: The header is not readable, or the file is longer or shorter than it says.
        TensorError: An entry's offsets contradict its dtype and shape.
    """
    found = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, found - 8):
            raise ConfigError(
                f"{file} is no complete safetensors file: it has {found} bytes and says that its "
                f"header has {length}. Delete it and download it again."
            )
        raw = stream.read(length)
    try:
        header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {
            name: msgspec.json.decode(entry, type=TensorEntry) for name, entry in header.items()
        }
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"The header of {file} cannot be read: {error}. Delete it and download it again."
        ) from error
    for name, entry in entries.items():
        _check_entry(name, entry)
    wanted = 8 + length + max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if found != wanted:
        what = "truncated" if found < wanted else "too long"
        raise ConfigError(
            f"{file} is {what}: wanted {wanted} bytes, found {found}. "
            "Delete it and download it again."
        )
    return entries


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def _read_json(file: Path, kind: Any) -> Any:
    if not file.is_file():
        raise ConfigError(f"The checkpoint has no {file.name} in {file.parent}; download it whole.")
    if file.stat().st_size > _MAX_JSON_BYTES:
        raise ConfigError(f"{file} has {file.stat().st_size} bytes; it cannot be what it is named.")
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file} cannot be read: {error}. Download it again.") from error


def _find_shards(folder: Path) -> list[str]:
    """Return the shards of a folder without an index, those its file names promise included."""
    names = {file.name for file in folder.glob("model*.safetensors")}
    if not names:
        raise ConfigError(
            f"{folder} has neither model.safetensors.index.json nor model*.safetensors. "
            "Only safetensors checkpoints can be served."
        )
    for number, count in (match.groups() for match in map(_SHARD_NAME.fullmatch, names) if match):
        width = len(number)
        names = names | {
            f"model-{i:0{width}}-of-{count}.safetensors" for i in range(1, int(count) + 1)
        }
        break
    return sorted(names)


def _check_present(folder: Path, shard: str) -> None:
    if Path(shard).name != shard:
        raise ConfigError(f"The index of {folder} names {shard!r}, which is no plain file name.")
    if not (folder / shard).is_file():
        raise ConfigError(f"{folder / shard} is missing; download the checkpoint whole.")


def _check_entry(name: str, entry: TensorEntry) -> None:
    begin, end = entry.data_offsets
    bits = _BITS.get(entry.dtype)
    wanted = prod(entry.shape) * bits // 8 if bits else end - begin
    if not 0 <= begin <= end or min(entry.shape, default=0) < 0 or end - begin != wanted:
        raise TensorError(
            name,
            wanted=f"{wanted} bytes for {entry.dtype} {list(entry.shape)}",
            got=f"offsets {begin} to {end}",
            advice="The file is damaged; download it again.",
        )


def _source_format(entries: Iterable[tuple[str, TensorEntry]]) -> str | None:
    """Tell the format of routed experts from their tensors' dtypes."""
    weights, scales = set(), set()
    for name, entry in entries:
        if ".experts." in name:
            kind = name.rpartition(".")[2]
            if kind in ("weight", "weight_packed"):
                weights.add(entry.dtype)
            elif kind in ("scale", "weight_scale", "weight_scale_inv"):
                scales.add(entry.dtype)
    if len(weights) != 1:
        return None
    (weight,) = weights
    if weight not in ("U8", "I8", "F4"):
        return {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F8_E4M3": "fp8"}.get(weight)
    if scales == {"F8_E4M3"}:
        return "nvfp4"
    return "mxfp4" if scales in ({"F8_E8M0"}, {"U8"}) else None
