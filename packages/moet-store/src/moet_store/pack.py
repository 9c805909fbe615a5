"""A pack on disk: its files, checked once when it is opened."""

from hashlib import sha256
from pathlib import Path

import msgspec
from msgspec import structs

from moet_store.errors import PackError, PackErrorKind
from moet_store.files import io_error, read_all
from moet_store.manifest import HEAD_BYTES, Manifest, manifest_path
from moet_store.spec import HEADER_BYTES, PackSpec, check_same, decode_header, header_digest

__all__ = ["Pack", "find_packs", "open_pack", "pack_path", "read_header", "read_manifest"]

SUFFIX = ".pack"


class Pack(msgspec.Struct, frozen=True, eq=False):
    """A pack that was opened: file, header and manifest belong together and are undamaged.

    Attributes:
        path: The pack file.
        spec: What its header says.
        digest: Checksum of the header; heat files name their pack by it.
        manifest: Checksums of its rows.
    """

    path: Path
    spec: PackSpec
    digest: int
    manifest: Manifest


def pack_path(folder: Path, spec: PackSpec) -> Path:
    """Return the file of a pack in a folder; different packs have different names."""
    whole = structs.replace(spec, rank=0, size=1, stripe=0, stripes=1)
    digest = sha256(msgspec.json.encode(whole)).hexdigest()[:16]
    parts = [spec.tier, digest, f"rank{spec.rank}of{spec.size}"]
    if spec.stripes > 1:
        parts.append(f"stripe{spec.stripe}of{spec.stripes}")
    return folder / (".".join(parts) + SUFFIX)


def find_packs(path: Path) -> list[Path]:
    """Return the pack that `path` is, or the packs in the folder that it is.

    Raises:
        PackError: NOT_A_PACK, there is none.
    """
    if path.is_file():
        return [path]
    packs = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else []
    if not packs:
        found = "a folder without" if path.is_dir() else "nothing there"
        raise PackError(
            PackErrorKind.NOT_A_PACK,
            path,
            wanted=f"a *{SUFFIX} file or a folder of them",
            found=found,
        )
    return packs


def open_pack(path: Path, wanted: PackSpec | None = None) -> Pack:
    """Open a pack for reading.

    Args:
        path: The pack file.
        wanted: What it must be, its stripe aside; None accepts any pack.

    Raises:
        PackError: Any of the kinds that say what is wrong with a file; OTHER_PACK with the field
            that differs.
    """
    spec, digest = read_header(path)
    if wanted is not None:
        check_same(wanted, spec, path, stripes=False)
    size = path.stat().st_size
    if size != spec.file_bytes:
        raise PackError(
            PackErrorKind.WRONG_SIZE,
            path,
            wanted=f"{spec.file_bytes} bytes",
            found=f"{size}",
            advice="Copy the file again, or open it for writing to resume it.",
        )
    return Pack(path, spec, digest, read_manifest(path, spec, digest))


def read_header(path: Path) -> tuple[PackSpec, int]:
    """Read a pack's header; returns the specification and the header's checksum.

    Raises:
        PackError: See `moet_store.spec.decode_header`; IO.
    """
    try:
        page = read_all(path, HEADER_BYTES)[:HEADER_BYTES]
    except OSError as error:
        raise io_error(error, path, "read the header") from error
    return decode_header(page, path), header_digest(page)


def read_manifest(path: Path, spec: PackSpec, digest: int) -> Manifest:
    """Read the manifest of the pack file `path`.

    Raises:
        PackError: MANIFEST_MISSING; see `Manifest.decode`; IO.
    """
    place = manifest_path(path)
    size = HEAD_BYTES + 16 * len(spec.layers) * len(spec.held)
    try:
        data = read_all(place, size)
    except FileNotFoundError:
        raise PackError(
            PackErrorKind.MANIFEST_MISSING,
            place,
            wanted="the manifest beside the pack",
            found="none",
            advice="Copy it too, or open the pack for writing to write it again.",
        ) from None
    except OSError as error:
        raise io_error(error, place, "read the manifest") from error
    return Manifest.decode(data, spec, digest, place)
