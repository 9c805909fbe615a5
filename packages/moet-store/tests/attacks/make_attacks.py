"""Writes the hostile packs of this folder: `python make_attacks.py`.

Each is a good pack of one row of 4096 bytes with one thing wrong; `EXPECTED` says what must be
found. Where a checksum would find it first, the checksum is made good again: an attacker does that.
"""

import json
import shutil
import struct
from pathlib import Path

import xxhash

from moet_store import PackErrorKind, PackWriter, plain_spec
from moet_store.manifest import manifest_path

HERE = Path(__file__).parent
HEADER = 4096

EXPECTED = {
    "good": None,
    "empty": PackErrorKind.NOT_A_PACK,
    "git-lfs-pointer": PackErrorKind.NOT_A_PACK,
    "manifest-in-place-of-the-pack": PackErrorKind.NOT_A_PACK,
    "header-cut-short": PackErrorKind.WRONG_SIZE,
    "row-cut-short": PackErrorKind.WRONG_SIZE,
    "polyglot-behind-the-rows": PackErrorKind.WRONG_SIZE,
    "version-2": PackErrorKind.VERSION,
    "json-of-4-gib": PackErrorKind.HEADER_DAMAGED,
    "json-beyond-the-page": PackErrorKind.HEADER_DAMAGED,
    "json-nested-1000-deep": PackErrorKind.HEADER_DAMAGED,
    "json-not-utf-8": PackErrorKind.HEADER_DAMAGED,
    "json-with-a-field-twice": PackErrorKind.HEADER_DAMAGED,
    "json-with-an-unknown-field": PackErrorKind.HEADER_DAMAGED,
    "json-with-true-for-a-number": PackErrorKind.HEADER_DAMAGED,
    "hidden-bytes-in-the-header": PackErrorKind.HEADER_DAMAGED,
    "experts-beyond-all-bounds": PackErrorKind.SPEC_INVALID,
    "experts-negative": PackErrorKind.SPEC_INVALID,
    "row-bytes-overflow": PackErrorKind.SPEC_INVALID,
    "layers-overlap": PackErrorKind.SPEC_INVALID,
    "name-climbs-folders": PackErrorKind.SPEC_INVALID,
    "rows-promised-but-not-there": PackErrorKind.WRONG_SIZE,
    "manifest-missing": PackErrorKind.MANIFEST_MISSING,
    "manifest-cut-short": PackErrorKind.WRONG_SIZE,
    "manifest-grown": PackErrorKind.WRONG_SIZE,
    "manifest-of-another-pack": PackErrorKind.OTHER_PACK,
    "manifest-of-version-2": PackErrorKind.VERSION,
    "manifest-with-forged-geometry": PackErrorKind.MANIFEST_DAMAGED,
    "manifest-with-a-forged-entry": PackErrorKind.ROW_DAMAGED,
    "row-swapped": PackErrorKind.ROW_DAMAGED,
}


def main() -> None:
    """Write every attack, and the list of what must be found."""
    for old in HERE.iterdir():
        if old.is_dir():
            shutil.rmtree(old)
    for name in EXPECTED:
        folder = HERE / name
        folder.mkdir()
        pack, manifest = good(folder)
        attack(name, pack, manifest)
        for lock in folder.glob("*.lock"):
            lock.unlink()
    kinds = {name: kind and kind.name for name, kind in EXPECTED.items()}
    (HERE / "expected.json").write_text(json.dumps(kinds, indent=2) + "\n")


def good(folder: Path) -> tuple[Path, Path]:
    """Write the pack that is attacked; returns pack and manifest."""
    spec = plain_spec("attacked", payload_bytes=HEADER, layers=(3,), experts=1)
    with PackWriter(folder, spec) as writer:
        writer.write_layer(3, [b"good" * 1024])
    pack = folder / "a.pack"
    manifest_path(writer.path).rename(manifest_path(pack))
    writer.path.rename(pack)
    return pack, manifest_path(pack)


def attack(name: str, pack: Path, manifest: Path) -> None:
    """Do one thing to a good pack."""
    data, table = pack.read_bytes(), manifest.read_bytes()
    body = data[16 : 16 + struct.unpack_from("<I", data, 12)[0]]
    fields = json.loads(body)
    rows = data[HEADER:]

    def header(body: bytes, length: int | None = None, version: int = 1) -> None:
        length = len(body) if length is None else length
        page = struct.pack("<8sII", b"MOETPACK", version, length) + body
        pack.write_bytes(sealed(page.ljust(HEADER - 8, b"\0")[: HEADER - 8]) + rows)

    def changed(**new: object) -> None:
        header(json.dumps(fields | new, separators=(",", ":")).encode())

    def head(at: int, value: bytes) -> None:
        changed_head = table[:at] + value + table[at + len(value) : 120]
        manifest.write_bytes(sealed(changed_head) + table[128:])

    def forge_entry() -> None:
        row_digest = xxhash.xxh3_64_intdigest(b"evil" * 1024, 3 << 32)
        entry = struct.pack("<QQ", row_digest, 0)
        manifest.write_bytes(table[:128] + entry)
        own = struct.unpack_from("<Q", table, 24)[0]
        check = xxhash.xxh3_64_intdigest(struct.pack("<IIQ", 3, 0, row_digest), own)
        entry = struct.pack("<QQ", row_digest, check)
        digest = struct.pack("<Q", xxhash.xxh3_64_intdigest(entry))
        manifest.write_bytes(sealed(table[:32] + digest + table[40:120]) + entry)

    actions = {
        "good": lambda: None,
        "empty": lambda: pack.write_bytes(b""),
        "git-lfs-pointer": lambda: pack.write_bytes(
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 8192\n"
        ),
        "manifest-in-place-of-the-pack": lambda: pack.write_bytes(table),
        "header-cut-short": lambda: pack.write_bytes(data[: HEADER - 1]),
        "row-cut-short": lambda: pack.write_bytes(data[:-1]),
        "polyglot-behind-the-rows": lambda: pack.write_bytes(data + b"PK\x05\x06" + bytes(18)),
        "version-2": lambda: header(body, version=2),
        "json-of-4-gib": lambda: header(body, length=2**32 - 1),
        "json-beyond-the-page": lambda: header(body, length=HEADER),
        "json-nested-1000-deep": lambda: header(b"[" * 1000 + b"]" * 1000),
        "json-not-utf-8": lambda: header(body.replace(b"plain", b"pl\xffin", 1)),
        "json-with-a-field-twice": lambda: header(body[:-1] + b',"experts":1}'),
        "json-with-an-unknown-field": lambda: changed(trusted=True),
        "json-with-true-for-a-number": lambda: changed(experts=True),
        "hidden-bytes-in-the-header": lambda: header(body + b"\0#!/bin/sh", length=len(body)),
        "experts-beyond-all-bounds": lambda: changed(experts=2**64),
        "experts-negative": lambda: changed(experts=-1),
        "row-bytes-overflow": lambda: changed(payload_bytes=2**63),
        "layers-overlap": lambda: changed(layers=[3, 3]),
        "name-climbs-folders": lambda: changed(tier="../../etc"),
        "rows-promised-but-not-there": lambda: changed(experts=2**16),
        "manifest-missing": manifest.unlink,
        "manifest-cut-short": lambda: manifest.write_bytes(table[:-1]),
        "manifest-grown": lambda: manifest.write_bytes(table + bytes(16)),
        "manifest-of-another-pack": lambda: head(24, b"another."),
        "manifest-of-version-2": lambda: head(8, struct.pack("<I", 2)),
        "manifest-with-forged-geometry": lambda: head(16, struct.pack("<I", 2**32 - 1)),
        "manifest-with-a-forged-entry": forge_entry,
        "row-swapped": lambda: pack.write_bytes(data[:HEADER] + b"evil" * 1024),
    }
    assert set(actions) == set(EXPECTED)
    actions[name]()


def sealed(data: bytes) -> bytes:
    """Append the checksum that headers and heads end with."""
    return data + struct.pack("<Q", xxhash.xxh3_64_intdigest(data))


if __name__ == "__main__":
    main()
