"""Where the committed SM120 cubins lie, and what they are; `build` makes them."""

from pathlib import Path

import msgspec

from moet_kernels import committed

__all__ = [
    "COMPILED",
    "FOLDER",
    "VARIANTS",
    "Built",
    "Manifest",
    "cubin_path",
    "listing_path",
    "read_manifest",
]

FOLDER = Path(__file__).parent / "kernels"
VARIANTS = ("tuned", "safe", "twin")
COMPILED = ("prepare", "sort", "mark", "combine")
"""Kernels that only nvcc makes."""


class Built(msgspec.Struct, frozen=True):
    """One kernel of the manifest.

    Attributes:
        sources: SHA-256 of each source file.
        cubins: SHA-256 of each variant's cubin.
        registers: of a thread, reserved ones included, for each variant.
        shared: bytes of static shared memory.
    """

    sources: dict[str, str]
    cubins: dict[str, str]
    registers: dict[str, int]
    shared: int


class Manifest(msgspec.Struct, frozen=True):
    """What the committed cubins were made by and from."""

    tools: dict[str, str]
    kernels: dict[str, Built]


def cubin_path(folder: Path, kernel: str, variant: str) -> Path:
    """Where a variant of a kernel lies."""
    return folder / f"{kernel}.{variant}.cubin"


def listing_path(folder: Path, kernel: str) -> Path:
    """Where the code of a compiled kernel lies as text, for an emulator without `nvdisasm`."""
    return folder / f"{kernel}.listing.sass"


def read_manifest(folder: Path = FOLDER) -> Manifest:
    """Read the manifest of a folder of cubins."""
    return committed.read_manifest(folder, Manifest)
