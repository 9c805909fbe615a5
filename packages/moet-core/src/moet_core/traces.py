"""Routing traces: which experts each token of a run was routed to, step by step."""

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from moet_core.errors import ConfigError

__all__ = ["RoutingTrace", "load_trace", "save_trace", "together"]

TRACE_VERSION = 1

MAX_TRACE_BYTES = 2**32
"""Of a file's arrays, unpacked: a small file can claim any size, and all of it goes to memory."""

ARRAYS = ("chosen", "ends", "experts", "prefill", "version")


class RoutingTrace(msgspec.Struct, frozen=True, eq=False):
    """What a run was routed to. A step is one forward pass of the engine.

    Attributes:
        chosen: uint16 [T, L, k], the distinct experts of each token and layer, in any order.
        ends: int64 [S], one past the last token of each step, ascending; the last is T.
        prefill: bool [S], true where the step read a chunk of a prompt, false where it decoded.
        experts: Routed experts of a layer, E.

    Raises:
        ValueError: Arrays of other kinds, or that contradict each other.
    """

    chosen: NDArray[np.uint16]
    ends: NDArray[np.int64]
    prefill: NDArray[np.bool_]
    experts: int

    def __post_init__(self) -> None:
        for name, dtype, dimensions in (
            ("chosen", np.uint16, 3),
            ("ends", np.int64, 1),
            ("prefill", np.bool_, 1),
        ):
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != dimensions or array.size == 0:
                raise ValueError(
                    f"{name} must be {np.dtype(dtype)} with {dimensions} dimensions and not empty, "
                    f"got {array.dtype} {array.shape}"
                )
        if len(self.ends) != len(self.prefill):
            raise ValueError(f"{len(self.ends)} steps end but {len(self.prefill)} have a kind")
        if self.ends[0] < 1 or (np.diff(self.ends) < 1).any() or self.ends[-1] != len(self.chosen):
            raise ValueError(
                f"steps must each have tokens and end at token {len(self.chosen)}, "
                f"got ends from {self.ends[0]} to {self.ends[-1]}"
            )
        if self.chosen.max() >= self.experts:
            raise ValueError(f"experts must be below {self.experts}, got {self.chosen.max()}")
        if (np.diff(np.sort(self.chosen, axis=2), axis=2) == 0).any():
            raise ValueError("a token is routed to the same expert of a layer twice")

    @property
    def layers(self) -> int:
        """Layers with routed experts, L."""
        return self.chosen.shape[1]

    @property
    def top_k(self) -> int:
        """Experts of a token in each layer, k."""
        return self.chosen.shape[2]

    def steps(self) -> Iterator[tuple[bool, NDArray[np.uint16]]]:
        """Yield each step: whether it is prefill, and its part of `chosen`."""
        start = 0
        for end, prefill in zip(self.ends.tolist(), self.prefill.tolist(), strict=True):
            yield prefill, self.chosen[start:end]
            start = end


def together(traces: Sequence[RoutingTrace]) -> RoutingTrace:
    """Return the trace of runs that one engine serves at the same time.

    Each takes its next step in turn: prefill steps stay steps of their own, the decode steps of a
    turn become one step. Runs that have ended take no part.

    Raises:
        ValueError: The traces are of models of different sizes.
    """
    sizes = {(trace.layers, trace.top_k, trace.experts) for trace in traces}
    if len(sizes) != 1:
        raise ValueError(f"traces must share (layers, top_k, experts), got {sorted(sizes)}")
    runs = [trace.steps() for trace in traces]
    parts: list[NDArray[np.uint16]] = []
    kinds: list[bool] = []
    while turn := [step for run in runs if (step := next(run, None)) is not None]:
        prompts = [chosen for prefill, chosen in turn if prefill]
        decoded = [chosen for prefill, chosen in turn if not prefill]
        parts += prompts
        kinds += [True] * len(prompts)
        if decoded:
            parts.append(np.concatenate(decoded))
            kinds.append(False)
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    return RoutingTrace(np.concatenate(parts), ends, np.array(kinds), traces[0].experts)


def save_trace(path: Path, trace: RoutingTrace) -> None:
    """Write a trace as a compressed .npz; equal traces give equal bytes."""
    # A byte is enough for most models, and halves what the compression has to see.
    small = np.uint8 if trace.experts <= 256 else np.uint16
    with path.open("wb") as file:
        np.savez_compressed(
            file,
            version=np.int64(TRACE_VERSION),
            experts=np.int64(trace.experts),
            chosen=trace.chosen.astype(small),
            ends=trace.ends,
            prefill=trace.prefill,
        )


def load_trace(path: Path) -> RoutingTrace:
    """Read a trace, strictly.

    Raises:
        ConfigError: No such file, no trace, one of another version, or one that is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename: member.file_size for member in archive.infolist()}
        if sorted(members) != [f"{name}.npy" for name in ARRAYS]:
            raise _error(path, f"the arrays {', '.join(ARRAYS)}", ", ".join(sorted(members)))
        if sum(members.values()) > MAX_TRACE_BYTES:
            raise _error(path, f"{MAX_TRACE_BYTES} bytes at most", f"{sum(members.values())}")
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in ARRAYS}
    except OSError as error:
        raise ConfigError(f"The routing trace {path} cannot be read: {error}.") from error
    except (
        zipfile.BadZipFile,
        zlib.error,
        ValueError,
        EOFError,
        RuntimeError,
        MemoryError,
    ) as error:
        # RuntimeError: encrypted, or of another compression. MemoryError: a header claims anything.
        raise _error(path, "a compressed .npz of plain arrays", str(error)) from error
    for name in ("version", "experts"):
        if found[name].dtype != np.int64 or found[name].shape != ():
            raise _error(path, f"one int64 as {name}", f"{found[name].dtype} {found[name].shape}")
    if found["version"] != TRACE_VERSION:
        raise _error(path, f"version {TRACE_VERSION}", f"version {found['version']}")
    if found["chosen"].dtype not in (np.uint8, np.uint16):
        raise _error(path, "experts as uint8 or uint16", f"{found['chosen'].dtype}")
    try:
        return RoutingTrace(
            found["chosen"].astype(np.uint16),
            found["ends"],
            found["prefill"],
            int(found["experts"]),
        )
    except ValueError as error:
        raise _error(path, "arrays that agree with each other", str(error)) from error


def _error(path: Path, wanted: str, found: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a routing trace: wanted {wanted}, found {found}. Record it anew."
    )
