"""Compiled files that are committed, and the digests of what they were made from.

A user needs no CUDA toolkit: PTX and cubins lie in the package. Beside them lies `manifest.json`,
and a builder that makes all of it anew, either into the package or to compare.
"""

import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

__all__ = ["builder", "differing", "digest", "read_manifest", "write_manifest"]

ManifestT = TypeVar("ManifestT", bound=msgspec.Struct)

_MANIFEST = "manifest.json"


def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def read_manifest(folder: Path, kind: type[ManifestT]) -> ManifestT:
    """Read the manifest of a folder."""
    return msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=kind)


def write_manifest(folder: Path, manifest: msgspec.Struct) -> None:
    """Write the manifest of a folder, the same bytes for the same content."""
    encoded = msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1)
    (folder / _MANIFEST).write_bytes(encoded + b"\n")


def differing(fresh: Path, folder: Path) -> list[str]:
    """List the files of a folder just made that another has not, or has with other bytes."""
    return [
        path.name
        for path in sorted(fresh.iterdir())
        if not (folder / path.name).is_file()
        or (folder / path.name).read_bytes() != path.read_bytes()
    ]


def builder(
    module: str,
    arguments: Sequence[str],
    *,
    build: Callable[[], Iterable[str]],
    differences: Callable[[], list[str]],
    same: str,
) -> int:
    """Run `python -m module [--check]` and return its exit status.

    Args:
        module: Its name.
        arguments: Of the command line.
        build: Makes everything into the package; returns lines about it.
        differences: Makes everything anew elsewhere; returns the files that differ.
        same: Said if none does.
    """
    if arguments == ["--check"]:
        different = differences()
        sys.stdout.write("\n".join(different) or same)
        sys.stdout.write("\n")
        return 1 if different else 0
    if arguments:
        sys.stdout.write(f"usage: python -m {module} [--check]\n")
        return 2
    for line in build():
        sys.stdout.write(f"{line}\n")
    return 0
