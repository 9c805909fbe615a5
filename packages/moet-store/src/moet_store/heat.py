"""Which rows were hot, kept beside the pack for the next start."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from moet_store.errors import PackError, PackErrorKind
from moet_store.files import io_error, read_all, replace_file
from moet_store.pack import Pack
from moet_store.rows import Key

__all__ = ["heat_path", "load_heat", "save_heat"]

HEAT_VERSION = 1

MAX_HEAT_BYTES = 2**26
"""Four million keys; the file is a hint and must not cost a start its memory."""


class _Heat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    pack: str
    keys: list[Key]


def heat_path(pack: Path) -> Path:
    """Return where the hot keys of a pack are kept."""
    return pack.with_name(f"{pack.name}.heat.json")


def save_heat(pack: Pack, keys: Sequence[Key]) -> None:
    """Write the hot keys of a pack in one step.

    Args:
        pack: The pack; with several stripes, the first.
        keys: Hottest first.

    Raises:
        PackError: NO_SPACE or IO.
    """
    path = heat_path(pack.path)
    heat = _Heat(HEAT_VERSION, f"{pack.digest:016x}", list(keys))
    try:
        replace_file(path, msgspec.json.encode(heat) + b"\n")
    except OSError as error:
        raise io_error(error, path, "write the hot keys") from error


def load_heat(pack: Pack, experts: int) -> list[Key]:
    """Return the hot keys of a pack, hottest first; none if none were kept.

    Args:
        pack: The pack; with several stripes, the first.
        experts: Experts of a layer, over all stripes.

    Raises:
        PackError: HEAT, the file is damaged, of another version or of another pack; IO. Starting
            cold is then safe: the file is only a hint.
    """
    path = heat_path(pack.path)
    try:
        data = read_all(path, MAX_HEAT_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise io_error(error, path, "read the hot keys") from error
    try:
        heat = msgspec.json.decode(data, type=_Heat)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _error(path, "a list of hot keys", str(error)) from error
    if heat.version != HEAT_VERSION:
        raise _error(path, f"version {HEAT_VERSION}", f"{heat.version}")
    if heat.pack != f"{pack.digest:016x}":
        raise _error(path, f"the hot keys of pack {pack.digest:016x}", f"those of {heat.pack[:64]}")
    layers = set(pack.spec.layers)
    for layer, expert in heat.keys:
        if layer not in layers or not 0 <= expert < experts:
            raise _error(path, "rows of the pack", f"layer {layer}, expert {expert}")
    return list(dict.fromkeys(heat.keys))


def _error(path: Path, wanted: str, found: str) -> PackError:
    return PackError(
        PackErrorKind.HEAT,
        path,
        wanted=wanted,
        found=found,
        advice="Delete the file; the next run keeps a new one.",
    )
