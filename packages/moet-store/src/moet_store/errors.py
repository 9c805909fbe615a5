"""The one error of packs; callers match on its kind, never on its text."""

from enum import Enum
from pathlib import Path
from typing import Any

from moet_core.errors import MoetError

__all__ = ["PackError", "PackErrorKind"]


class PackErrorKind(Enum):
    """What is wrong."""

    NOT_A_PACK = "not a pack"
    """The file does not begin with the magic bytes of a pack."""
    VERSION = "version"
    """The file has a format version that this release does not read."""
    HEADER_DAMAGED = "header damaged"
    """The header differs from its own checksum, or its bytes cannot be decoded."""
    SPEC_INVALID = "specification invalid"
    """A field of the header, or of the specification to write, has no sensible value."""
    OTHER_PACK = "other pack"
    """A good pack, but of another checkpoint, codec, rank, ...: `field` says which."""
    WRONG_SIZE = "wrong size"
    """A file is shorter or longer than its header says."""
    MANIFEST_MISSING = "manifest missing"
    """The pack has no manifest beside it."""
    MANIFEST_DAMAGED = "manifest damaged"
    """The manifest differs from its own checksums."""
    ROW_MISSING = "row missing"
    """The row is not in this pack, or its layer has not been written yet."""
    ROW_DAMAGED = "row damaged"
    """The bytes of a row differ from the checksum in the manifest."""
    ROW_SHORT = "row short"
    """The file ended inside a row."""
    ROW_INVALID = "row invalid"
    """A row to write has the wrong length, or there are too few or too many."""
    LAYER_BUSY = "layer busy"
    """Another process writes this layer at this moment."""
    STRIPES = "stripes"
    """The packs opened together are no complete set of stripes."""
    NO_SPACE = "no space"
    """The file system has too little room; what is written stays and can be resumed."""
    IO = "I/O error"
    """The operating system refused to read, write, open or lock."""
    UNAVAILABLE = "unavailable"
    """What was asked for explicitly does not work on this machine."""
    BUFFER = "buffer"
    """A destination has the wrong length or alignment, or is not writable."""
    ARENA_FULL = "arena full"
    """Every slot holds a row that the current step uses."""
    ARENA_BROKEN = "arena broken"
    """The arena's tables or bytes contradict each other: a bug, or damaged memory."""
    HEAT = "heat file"
    """The list of hot keys is damaged or belongs to another pack."""
    CHECKPOINT = "checkpoint"
    """The checkpoint's identity cannot be computed."""


class PackError(MoetError):
    """Something is wrong with a pack, with where it lies, or with what was asked of it.

    Attributes:
        kind: What is wrong.
        path: The file or folder concerned, None where there is none.
        wanted: What was needed, a noun phrase.
        found: What was there, a noun phrase.
        advice: What to do, a sentence.
        layer: The model layer concerned, None where it is not about one.
        expert: The expert concerned, None where it is not about one.
        field: The differing field of the specification, for OTHER_PACK and SPEC_INVALID.
    """

    def __init__(
        self,
        kind: PackErrorKind,
        path: Path | None,
        *,
        wanted: str,
        found: str,
        advice: str = "",
        layer: int | None = None,
        expert: int | None = None,
        field: str | None = None,
    ) -> None:
        where = [str(path)] if path is not None else []
        where += [
            f"{name} {number}"
            for name, number in (("layer", layer), ("expert", expert))
            if number is not None
        ]
        place = ", ".join(where)
        message = f"{kind.value}: wanted {wanted}, found {found}."
        if place:
            message = f"{place}: {message}"
        super().__init__(f"{message} {advice}" if advice else message)
        self.kind = kind
        self.path = path
        self.wanted = wanted
        self.found = found
        self.advice = advice
        self.layer = layer
        self.expert = expert
        self.field = field

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross process borders by pickle, which knows no keyword-only arguments.
        names = ("wanted", "found", "advice", "layer", "expert", "field")
        return _pack_error, (self.kind, self.path, {name: getattr(self, name) for name in names})


def _pack_error(kind: PackErrorKind, path: Path | None, details: dict[str, Any]) -> PackError:
    return PackError(kind, path, **details)
