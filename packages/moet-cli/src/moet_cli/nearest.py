"""The text for a name that does not exist: which one was meant, and which ones there are."""

import difflib
from collections.abc import Iterable

__all__ = ["unknown_name"]


def unknown_name(kind: str, name: str, allowed: Iterable[str]) -> str:
    """Say that `name` is no such `kind`, and name the nearest valid one and all of them."""
    names = sorted(allowed)
    (nearest,) = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return f"Unknown {kind} {name!r}; did you mean {nearest!r}? There are: {', '.join(names)}."
