"""How fast the portable kernels compute expert layers on a GPU, against its own bandwidth."""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from moet_core.geometry import DEEPSEEK_V4_FLASH, GLM_5_2, KIMI_K2_7, ModelGeometry
from moet_core.results import Measurement, measurement
from moet_core.row import row_layout
from moet_kernels.bench_device import copy_bandwidth, graph_times, read_bandwidth
from moet_kernels.experts import Tier, experts
from moet_kernels.portable.few import DECODE_TOKENS, few_parts, native_kernels_of
from moet_kernels.portable.many import many_parts
from moet_kernels.portable.native_tiles import cuts_for, tiles_for

__all__ = ["MODELS", "NOTES", "Batch", "Plan", "Rival", "bench_experts", "path_notes"]

MODELS = {"DeepSeek-V4-Flash": DEEPSEEK_V4_FLASH, "GLM-5.2": GLM_5_2, "Kimi-K2.7": KIMI_K2_7}

NOTES = (
    "times are of CUDA graph replays, by events, divided by the layers in the graph; every layer "
    "in a graph routes to experts of its own while there are any, far more bytes than the L2 holds",
    "up to 16 tokens all routed experts are distinct where the model has that many; above, routing "
    "is uniform",
    "GEMMs: gate-up with its activation, and down, with what brings x and pairs into their order; "
    "layer: all launches of the operation, in portions where parts would exceed 1 GiB",
    "bytes: codes, scales and tensor scales of the distinct experts routed to, each once",
    "share of read bandwidth: bytes / time / the read bandwidth measured in this run",
    "random codes, scales, activations and routing; checked against the reference backend first",
)

_MOST_LAYERS = 32
_MOST_ERROR = 4e-3
_CHECKED_TOKENS = 16


class Batch(NamedTuple):
    """x bfloat16 [T, H], weights float32 [T, k] and ids int32 [T, k]."""

    x: Tensor
    weights: Tensor
    ids: Tensor


class Plan(NamedTuple):
    """What to measure: names of MODELS, codecs, numbers of tokens, samples of each figure."""

    models: Sequence[str]
    codecs: Sequence[str]
    tokens: Sequence[int]
    samples: int


Rival = Callable[[ModelGeometry], tuple[str, Callable[[Batch], object]]]
"""Makes another implementation's layer of random experts: its name, and a call for a batch."""


def bench_experts(plan: Plan, rival: Rival | None, say: Callable[[str], None]) -> list[Measurement]:
    """Measure expert layers of models on the current GPU.

    Args:
        plan: What to measure.
        rival: An implementation to compare whole layers with, or None.
        say: Told what is measured next.

    Raises:
        RuntimeError: A result is wrong.
    """
    say("bandwidth of this card")
    read = read_bandwidth(plan.samples)
    found = [
        measurement("read bandwidth", "GB/s", [rate / 1e9 for rate in read]),
        measurement(
            "copy bandwidth", "GB/s", [rate / 1e9 for rate in copy_bandwidth(plan.samples)]
        ),
    ]
    bandwidth = statistics.median(read)
    for name in plan.models:
        model = MODELS[name]
        layers: dict[tuple[str, int], float] = {}
        for codec in plan.codecs:
            tier = random_tier(codec, model)
            for tokens in plan.tokens:
                say(f"{name}, {codec}, {tokens} tokens")
                of_this, layer = _measure(name, model, tier, tokens, plan.samples, bandwidth)
                found += of_this
                layers[codec, tokens] = layer
            del tier
        if rival is not None:
            found += _compare(name, model, rival, plan, layers, say)
    say("bandwidth of this card, again")
    again = read_bandwidth(plan.samples)
    found.append(measurement("read bandwidth, at the end", "GB/s", [r / 1e9 for r in again]))
    return found


def path_notes(plan: Plan, device: torch.device) -> tuple[str, ...]:
    """Say which kernels a plan measures on a device: those that the package chooses there."""
    few: dict[str, list[str]] = {}
    many: dict[str, list[str]] = {}
    for name, codec in product(plan.models, plan.codecs):
        model = MODELS[name]
        layout = row_layout(codec, model.hidden, model.intermediate)
        native = native_kernels_of(device, model.top_k, layout)
        few.setdefault("Triton" if native is None else "CUDA", []).append(f"{name} {codec}")
        tiles = tiles_for(device) if cuts_for(1, 1, layout, None) else None
        many.setdefault("Triton" if tiles is None else "CUDA", []).append(f"{name} {codec}")
    return (
        *(
            f"up to {DECODE_TOKENS} tokens: {path} kernels of decode steps for {', '.join(of)}"
            for path, of in few.items()
        ),
        *(
            f"more than {DECODE_TOKENS} tokens: {path} kernels of prefill for {', '.join(of)}"
            for path, of in many.items()
        ),
    )


def random_tier(codec: str, model: ModelGeometry) -> Tier:
    """Return a layer of experts whose codes and scales are random, each in the slot of its id."""
    layout = row_layout(codec, model.hidden, model.intermediate)
    shape = (model.experts, layout.row_bytes)
    pool = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    low, high = (40, 73) if codec == "fp4-nv" else (118, 125)  # moderate e4m3 and e8m0 scales
    for section in (layout.scales13, layout.scales2):
        scales = torch.randint(low, high, (model.experts, section.length), device="cuda")
        pool[:, section.slice] = scales.byte()
    if layout.tensor_scales.length:
        scales = torch.rand(model.experts, 4, device="cuda") * 0.02 + 0.01
        pool[:, layout.tensor_scales.slice] = scales.view(torch.uint8)
    slot_of = torch.arange(model.experts, dtype=torch.int32, device="cuda")
    return Tier(pool, slot_of, layout)


def batches(model: ModelGeometry, tokens: int) -> list[Batch]:
    """Return batches whose experts are distinct within each and, as far as possible, among them."""
    of_batch = tokens * model.top_k
    distinct = tokens <= DECODE_TOKENS and of_batch <= model.experts
    count = min(_MOST_LAYERS, model.experts // of_batch) if distinct else 2
    shuffled = torch.randperm(model.experts, device="cuda").int()
    made = []
    for index in range(count):
        if distinct:
            ids = shuffled[index * of_batch : (index + 1) * of_batch].view(tokens, model.top_k)
        else:
            scores = torch.rand(tokens, model.experts, device="cuda")
            ids = scores.topk(model.top_k).indices.int()
        x = torch.randn(tokens, model.hidden, device="cuda").bfloat16()
        made.append(Batch(x, torch.rand(tokens, model.top_k, device="cuda"), ids.contiguous()))
    return made


def _measure(
    name: str, model: ModelGeometry, tier: Tier, tokens: int, samples: int, bandwidth: float
) -> tuple[list[Measurement], float]:
    """Return measurements of a number of tokens, and the layer's median seconds."""
    codec = tier.layout.codec
    made = batches(model, tokens)
    layer = partial(_layer, model, tier)
    _check(layer, made[0], f"{name}, {codec}, {tokens} tokens")
    gemms = graph_times([_gemms(model, tier, batch) for batch in made], samples)
    whole = graph_times([partial(layer, batch, "portable") for batch in made], samples)
    moved = [len(batch.ids.unique()) * tier.layout.payload_bytes for batch in made]
    mean_bytes = statistics.fmean(moved)
    label = f"{name}, {codec}, {tokens} token{'s' if tokens > 1 else ''}"
    found = [measurement(f"{label}: bytes", "MB", [n / 1e6 for n in moved])]
    for what, times in (("GEMMs", gemms), ("layer", whole)):
        shares = [100 * mean_bytes / seconds / bandwidth for seconds in times]
        found += [
            measurement(f"{label}: {what}", "us", [1e6 * seconds for seconds in times]),
            measurement(f"{label}: {what}, share of read bandwidth", "%", shares),
        ]
    operations = 6 * tokens * model.top_k * model.hidden * model.intermediate
    rates = [operations / seconds / 1e12 for seconds in whole]
    found.append(measurement(f"{label}: layer", "TFLOP/s", rates))
    return found, statistics.median(whole)


def _layer(model: ModelGeometry, tier: Tier, batch: Batch, backend: str) -> Tensor:
    return experts(
        *batch,
        tier.pool,
        tier.slot_of,
        hidden=model.hidden,
        intermediate=model.intermediate,
        codec=tier.layout.codec,
        swiglu_limit=model.swiglu_limit,
        backend=backend,
    )


def _gemms(model: ModelGeometry, tier: Tier, batch: Batch) -> Callable[[], None]:
    """Return a call of the kernels that read weights, and for many tokens of the sort before."""
    parts = torch.empty(batch.ids.numel(), model.hidden, device="cuda")
    limit = model.swiglu_limit or 0.0
    if len(batch.x) > DECODE_TOKENS:
        return partial(many_parts, parts, batch.x, batch.ids, tier, None, limit)
    return partial(few_parts, parts, batch.x, batch.ids, tier, None, limit)


def _check(layer: Callable[[Batch, str], Tensor], batch: Batch, what: str) -> None:
    """Compare the first tokens of a result with the reference, which is slow."""
    found = layer(batch, "portable")[:_CHECKED_TOKENS].double()
    wanted = layer(Batch(*(t[:_CHECKED_TOKENS] for t in batch)), "reference").double()
    error = float((found - wanted).norm() / wanted.norm())
    if not error <= _MOST_ERROR or math.isnan(error):
        raise RuntimeError(
            f"{what}: the relative error is {error:.2e}, {_MOST_ERROR:g} is allowed; "
            "nothing was measured"
        )


def _compare(
    name: str,
    model: ModelGeometry,
    rival: Rival,
    plan: Plan,
    layers: dict[tuple[str, int], float],
    say: Callable[[str], None],
) -> list[Measurement]:
    """Measure the rival's layers, and how many times longer they take than each codec's."""
    other, call = rival(model)
    found = []
    for tokens in plan.tokens:
        say(f"{name}, {other}, {tokens} tokens")
        made = batches(model, tokens)
        times = graph_times([partial(call, batch) for batch in made], plan.samples)
        label = f"{tokens} token{'s' if tokens > 1 else ''}"
        microseconds = [1e6 * seconds for seconds in times]
        found.append(measurement(f"{name}, {other}, {label}: layer", "us", microseconds))
        for codec in plan.codecs:
            ratios = [seconds / layers[codec, tokens] for seconds in times]
            found.append(
                measurement(f"{name}, {codec}, {label}: times faster than {other}", "x", ratios)
            )
    return found
