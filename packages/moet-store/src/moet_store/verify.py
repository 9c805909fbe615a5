"""Checks packs: what they say about themselves, and every row of them."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import msgspec

from moet_store.errors import PackError, PackErrorKind
from moet_store.memory import aligned_buffer
from moet_store.pack import open_pack
from moet_store.reader import PackReader
from moet_store.spec import PackSpec

__all__ = ["Problem", "Report", "verify_pack"]

BUFFERS = 4
"""Rows read ahead of the checksum."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong: the fields of a `PackError`, the kind by its name."""

    kind: str
    file: str
    layer: int | None
    expert: int | None
    message: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was found.

    Attributes:
        pack: The pack file.
        spec: What its header says; None if that cannot be read.
        layers: Layers that are written.
        rows: Rows that were read and compared with their checksum.
        problems: What is wrong, in file order; none in a good pack.
    """

    pack: str
    spec: PackSpec | None = None
    layers: int = 0
    rows: int = 0
    problems: tuple[Problem, ...] = ()


def verify_pack(
    path: Path,
    *,
    deep: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Check a pack, which may be one stripe of several.

    Args:
        path: The pack file.
        deep: Read every row and compare it with its checksum.
        progress: Called with rows done and rows in all.
    """
    try:
        pack = open_pack(path)
    except PackError as error:
        return Report(pack=str(path), problems=(_problem(error, path),))
    except OSError as error:
        found = PackError(PackErrorKind.IO, path, wanted="to open it", found=str(error.strerror))
        return Report(pack=str(path), problems=(_problem(found, path),))
    problems = [
        _problem(_unwritten(path, layer), path)
        for layer in pack.spec.layers
        if layer not in pack.manifest.written
    ]
    keys = [(layer, expert) for layer in pack.manifest.written for expert in pack.spec.held]
    rows = 0
    if deep:
        rows = len(keys)
        errors = _read_all(path, keys, progress)
        problems += [_problem(error, path) for error in errors]
    return Report(
        pack=str(path),
        spec=pack.spec,
        layers=len(pack.manifest.written),
        rows=rows,
        problems=tuple(problems),
    )


def _read_all(
    path: Path, keys: list[tuple[int, int]], progress: Callable[[int, int], None]
) -> list[PackError]:
    """Read all rows in file order; returns the errors of those that are bad, in that order."""
    errors: dict[tuple[int, int], PackError] = {}
    with PackReader([path], partial=True) as reader:
        row_bytes = reader.spec.row_bytes
        region = aligned_buffer(BUFFERS * row_bytes)
        reader.register(region)
        free = [region[at : at + row_bytes] for at in range(0, len(region), row_bytes)]
        waiting = iter(keys)
        buffers: dict[int, memoryview] = {}
        done = 0
        while done < len(keys):
            for key in islice(waiting, len(free)):
                buffer = free.pop()
                (ticket,) = reader.submit([key], [buffer])
                buffers[ticket] = buffer
            for completion in reader.wait_any():
                done += 1
                free.append(buffers.pop(completion.ticket))
                if completion.error is not None:
                    errors[completion.key] = completion.error
                progress(done, len(keys))
    return [errors[key] for key in sorted(errors)]


def _unwritten(path: Path, layer: int) -> PackError:
    return PackError(
        PackErrorKind.ROW_MISSING,
        path,
        wanted="every layer written",
        found="one that is not",
        advice="Resume writing the pack.",
        layer=layer,
    )


def _problem(error: PackError, path: Path) -> Problem:
    return Problem(
        kind=error.kind.name,
        file=str(error.path or path),
        layer=error.layer,
        expert=error.expert,
        message=str(error),
    )
