"""Adds up what this worker converted and reports it once all of its layers are done."""

import msgspec

from moet_vllm.events import Converted, emit

__all__ = ["Conversion", "expect_layer", "finish_layer", "report_no_layers"]


class Conversion(msgspec.Struct, frozen=True):
    """What became of one layer's experts on this rank (bytes and weights: this rank's share)."""

    experts: int
    tensors: int
    weights: int
    bytes_before: int
    bytes_after: int
    peak_staged_bytes: int
    bits_per_weight: float
    codec: str
    source: str


_waiting: set[str] = set()
_done: dict[str, Conversion] = {}


def expect_layer(name: str) -> None:
    """Announce a layer whose experts will be converted."""
    _waiting.add(name)


def finish_layer(
    name: str, conversion: Conversion, *, rank: int, world: int, tp_rank: int, seconds: float
) -> None:
    """Record a converted layer; the last one announced emits the `converted` event."""
    _waiting.discard(name)
    _done[name] = conversion
    if _waiting:
        return
    parts = list(_done.values())
    _done.clear()
    emit(
        Converted(
            rank=rank,
            world=world,
            tp_rank=tp_rank,
            layers=len(parts),
            experts=sum(part.experts for part in parts),
            tensors=sum(part.tensors for part in parts),
            weights=sum(part.weights for part in parts),
            bytes_before=sum(part.bytes_before for part in parts),
            bytes_after=sum(part.bytes_after for part in parts),
            bits_per_weight=parts[0].bits_per_weight,
            codec=parts[0].codec,
            source=", ".join(sorted({part.source for part in parts})),
            peak_staged_bytes=max(part.peak_staged_bytes for part in parts),
            seconds=round(seconds, 3),
        )
    )


def report_no_layers(*, rank: int, world: int, tp_rank: int, codec: str) -> None:
    """Emit the `converted` event of a rank whose layers have no routed experts."""
    emit(
        Converted(
            rank=rank,
            world=world,
            tp_rank=tp_rank,
            layers=0,
            experts=0,
            tensors=0,
            weights=0,
            bytes_before=0,
            bytes_after=0,
            bits_per_weight=0.0,
            codec=codec,
            source="",
            peak_staged_bytes=0,
            seconds=0.0,
        )
    )
