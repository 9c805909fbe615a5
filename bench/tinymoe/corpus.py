"""The text: Python files of CPython and of Debian packages, and CPython's documentation.

    python -m tinymoe.corpus OUT --debs FOLDER     (packages fetched with `apt-get download`)

Whole files are held out by a hash of their content, so that no copy of a held-out file can be in
the training text.
"""

import argparse
import hashlib
import json
import lzma
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["HELD_OUT_SHARE", "Texts", "collect", "is_held_out", "read_texts"]

HELD_OUT_SHARE = 50  # one file in so many
SMALLEST, LARGEST = 400, 400_000
# Tables of numbers, generated grammars and the like are no text.
MAX_DIGIT_SHARE = 0.12
Texts = dict[str, list[str]]


def is_held_out(text: str) -> bool:
    """Tell whether a file's text is kept from training."""
    return hashlib.sha256(text.encode()).digest()[0] * HELD_OUT_SHARE < 256


def _files(folder: Path, pattern: str) -> Iterator[str]:
    for path in sorted(folder.rglob(pattern)):
        if "site-packages" in path.parts or not path.is_file() or path.is_symlink():
            continue
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        digits = sum(text.count(digit) for digit in "0123456789")
        if SMALLEST <= len(text) <= LARGEST and digits <= MAX_DIGIT_SHARE * len(text):
            yield text


def _unpacked(package: Path, work: Path) -> Path:
    folder = work / package.name
    subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)
    return folder


def collect(debs: Path | None) -> tuple[dict[str, Texts], list[dict[str, object]]]:
    """Gather all text.

    Args:
        debs: a folder of Debian packages, or None for the running interpreter's library alone.

    Returns:
        "train" and "held_out" texts by kind ("python", "docs"), and where they came from.
    """
    found: dict[str, Texts] = {s: {"python": [], "docs": []} for s in ("train", "held_out")}
    sources: list[dict[str, object]] = []
    seen: set[bytes] = set()

    def take(name: str, kind: str, texts: Iterator[str]) -> None:
        digest, count, size = hashlib.sha256(), 0, 0
        for text in texts:
            key = hashlib.sha256(text.encode()).digest()
            if key in seen:
                continue
            seen.add(key)
            digest.update(key)
            count, size = count + 1, size + len(text.encode())
            found["held_out" if is_held_out(text) else "train"][kind].append(text)
        sources.append(
            {
                "source": name,
                "kind": kind,
                "files": count,
                "bytes": size,
                "sha256": digest.hexdigest(),
            }
        )

    library = Path(sysconfig.get_path("stdlib"))
    version = sysconfig.get_python_version()
    take(f"CPython {version} Lib", "python", _files(library, "*.py"))
    with tempfile.TemporaryDirectory() as work:
        for package in sorted(debs.glob("*.deb")) if debs else []:
            folder = _unpacked(package, Path(work))
            take(package.name, "python", _files(folder, "*.py"))
            take(package.name, "docs", _files(folder, "*.rst.txt"))
    return found, sources


def read_texts(folder: Path) -> dict[str, Texts]:
    """Read what this module's command wrote."""
    return json.loads(lzma.open(folder / "texts.json.xz").read())


def main() -> None:
    """Collect, and write texts.json.xz and sources.json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--debs", type=Path)
    args = parser.parse_args()
    found, sources = collect(args.debs)
    args.out.mkdir(parents=True, exist_ok=True)
    with lzma.open(args.out / "texts.json.xz", "wb", preset=1) as file:
        file.write(json.dumps(found, ensure_ascii=False).encode())
    (args.out / "sources.json").write_text(json.dumps(sources, indent=1) + "\n")
    for source in sources:
        print(source)


if __name__ == "__main__":
    main()
