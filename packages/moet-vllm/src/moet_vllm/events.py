"""Facts that the serving processes report to whoever started them, one JSON line each."""

import sys
from typing import Any

import msgspec

__all__ = ["MARKER", "Converted", "Pool", "ProcessEnded", "emit"]

MARKER = "moet-event: "


class Converted(msgspec.Struct, frozen=True, tag_field="event", tag="converted"):
    """All experts of this worker are in their served form.

    Bytes and weights are this rank's share: their sum over all ranks is the model's. Layers,
    experts and tensors are what the rank holds (a part of) and repeat over `tp_rank`.
    """

    rank: int
    world: int
    tp_rank: int
    layers: int
    experts: int
    tensors: int
    weights: int
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    codec: str
    source: str
    peak_staged_bytes: int
    seconds: float


class Pool(msgspec.Struct, frozen=True, tag_field="event", tag="pool"):
    """A rank's pool of experts is open.

    Attributes:
        rank: Number of the rank.
        slots: Experts that it can hold.
        ring: Slots besides, for experts that a streamed step uses once.
        experts: Experts of the rank's layers.
        coverage: Share of the experts that have a slot.
        pool_bytes: Device memory of the pool.
        working_set_of_one_token: Most experts that a step of one token wants.
        repairable_tokens: Tokens up to which a step is repaired; beyond it is streamed.
        store: Where the other experts wait.
    """

    rank: int
    slots: int
    ring: int
    experts: int
    coverage: float
    pool_bytes: int
    working_set_of_one_token: int
    repairable_tokens: int
    store: str


class ProcessEnded(msgspec.Struct, frozen=True, tag_field="event", tag="process-ended"):
    """A child process ended with a non-zero exit code (negative: killed by that signal)."""

    name: str
    pid: int
    exitcode: int
    signal: str
    oom_kills: int


def emit(event: Any) -> None:
    """Write one event line to standard error in a single call, so that lines do not interleave."""
    line = MARKER + msgspec.json.encode(event).decode() + "\n"
    sys.stderr.write(line)
    sys.stderr.flush()
