"""Which cuts of the portable kernels are fastest on a GPU: every candidate, measured."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch

from moet_core.results import Measurement, measurement
from moet_kernels.bench_device import graph_times
from moet_kernels.bench_experts import MODELS, Batch, Plan, batches, random_tier
from moet_kernels.portable.few import DECODE_TOKENS, StreamShape, launch_down, launch_gate_up
from moet_kernels.portable.many import TileShape, many_parts, native_parts
from moet_kernels.portable.native_tiles import tiles_for
from moet_kernels.portable.tier import Tier
from moet_kernels.portable.tile_cuts import TILE_CUTS

__all__ = ["STREAM_SHAPES", "TILE_SHAPES", "sweep"]

STREAM_SHAPES = tuple(
    StreamShape(*shape) for shape in product((1, 2, 4), (4, 8), (1, 2, 3), (96, 128, 168))
)

TILE_SHAPES = (
    TileShape(64, 4, 4, 4, 4, 2),
    TileShape(64, 4, 4, 4, 4, 3),
    TileShape(64, 8, 8, 8, 8, 2),
    TileShape(128, 4, 4, 4, 4, 2),
    TileShape(128, 4, 4, 8, 8, 2),
    TileShape(128, 8, 8, 8, 8, 2),
)
"""No down tiles of 8 blocks in 3 stages, which `tile_shape` says are wrong."""


def sweep(plan: Plan, say: Callable[[str], None]) -> list[Measurement]:
    """Measure every candidate for every model, codec and number of tokens of a plan.

    Candidates that an architecture has no room for are told and left out.
    """
    found = []
    for name, codec in product(plan.models, plan.codecs):
        model = MODELS[name]
        tier = random_tier(codec, model)
        for tokens in plan.tokens:
            made = batches(model, tokens)
            if tokens <= DECODE_TOKENS:
                cases = _decode_cases(tier, made, model.swiglu_limit or 0.0)
            else:
                cases = _prefill_cases(tier, made, model.swiglu_limit or 0.0)
            for what, calls in cases:
                label = f"{name}, {codec}, {tokens} token{'s' if tokens > 1 else ''}: {what}"
                say(label)
                try:
                    times = graph_times(calls, plan.samples)
                except _no_room() as error:
                    say(f"no room: {error}")
                    continue
                found.append(measurement(label, "us", [1e6 * seconds for seconds in times]))
        del tier
    return found


Cases = Iterator[tuple[str, Sequence[Callable[[], object]]]]


def _decode_cases(tier: Tier, made: list[Batch], limit: float) -> Cases:
    activated = [launch_gate_up(b.x, b.ids, tier, None, limit) for b in made]
    parts = torch.empty(made[0].ids.numel(), tier.layout.hidden, device="cuda")
    for shape in STREAM_SHAPES:
        yield (
            f"gate-up, {_described(shape)}",
            [partial(launch_gate_up, b.x, b.ids, tier, None, limit, shape=shape) for b in made],
        )
        yield (
            f"down, {_described(shape)}",
            [
                partial(launch_down, parts, a, b.ids, tier, None, shape)
                for a, b in zip(activated, made, strict=True)
            ],
        )


def _prefill_cases(tier: Tier, made: list[Batch], limit: float) -> Cases:
    parts = torch.empty(made[0].ids.numel(), tier.layout.hidden, device="cuda")
    for shape in TILE_SHAPES:
        yield (
            f"both, {_described(shape)}",
            [partial(many_parts, parts, b.x, b.ids, tier, None, limit, shape) for b in made],
        )
    native, codec = tiles_for(parts.device), tier.layout.codec
    if native is None:
        return
    of_codec = [cut for cut in TILE_CUTS if cut.codec == codec]
    for gate_up, down in zip(of_codec[::2], of_codec[1::2], strict=True):
        cuts = {codec: (gate_up, down)}
        yield (
            f"both, CUDA, groups of {gate_up.vectors}, {gate_up.warpgroups} warpgroups",
            [
                partial(native_parts, native, cuts, parts, b.x, b.ids, tier, None, limit)
                for b in made
            ],
        )


def _described(shape: StreamShape | TileShape) -> str:
    values = shape._asdict().items()
    return ", ".join(
        f"{value} {name.replace('_', ' ')}"
        for name, value in values
        if value and name != "registers_of_two"
    )


def _no_room() -> type[Exception]:
    from triton.runtime.errors import OutOfResources

    return OutOfResources
