"""Divides memory of a device into the slots of a pool and its ring."""

from moet_core.errors import ConfigError
from moet_core.row import RowLayout
from moet_vllm.residency.tier import PoolShape

__all__ = ["GIB", "auto_pool", "least_pool", "pool_shape", "ring_rows"]

GIB = 2**30


def ring_rows(slots: int, experts: int) -> int:
    """Return the rows of a pool's ring: half a layer, if that is no more than an eighth of it.

    Its halves are what a streamed step copies and computes at a time: large enough to hide what
    starting either costs, and two or more for each layer.
    """
    return max(2, min(experts // 2, slots // 8)) // 2 * 2


def least_pool(layers: tuple[int, ...], experts: int, top_k: int, row: RowLayout) -> PoolShape:
    """Return a pool that holds one layer, with the ring of a large one; `auto` begins with it."""
    ring = ring_rows(8 * experts, experts)
    slots = min(experts, len(layers) * experts - 1)
    return PoolShape(layers=layers, experts=experts, top_k=top_k, row=row, slots=slots, ring=ring)


def auto_pool(least: PoolShape, room: int) -> PoolShape:
    """Return the largest pool that fits into what a device has left.

    Args:
        least: The pool of `least_pool`.
        room: Bytes left for the pool beside weights, activations and KV cache; negative if these
            alone do not fit.

    Raises:
        ConfigError: Not even one layer fits.
    """
    size = max(room, 0) / GIB
    return pool_shape(
        "pool", size, least.layers, least.experts, least.top_k, least.row, advice=AUTO_ADVICE
    )


AUTO_ADVICE = (
    "With pool=auto it gets what weights, activations and the KV cache leave of the device: raise "
    "--gpu-memory-utilization, or lower --kv-cache-memory-bytes, --max-model-len or "
    "--max-num-batched-tokens."
)


def pool_shape(
    name: str,
    size: float | str,
    layers: tuple[int, ...],
    experts: int,
    top_k: int,
    row: RowLayout,
    *,
    is_fine: bool = False,
    advice: str | None = None,
) -> PoolShape:
    """Divide a pool into slots and the ring of streamed steps.

    Args:
        name: The option that set its size, for errors.
        size: GiB, or "all".
        layers: Model indices of the rank's layers.
        experts: Routed experts of a layer.
        top_k: Experts a token is routed to.
        row: Layout of a row.
        is_fine: A fine tier: it may be smaller than a layer, and it has a ring beside slots for
            all experts too, since they may be absent at first.
        advice: What to do about a pool that is too small; by default, to make it larger.

    Raises:
        ConfigError: The pool is smaller than one layer; a fine tier, than two tokens' experts.
    """
    total = len(layers) * experts
    slots = total if size == "all" else int(float(size) * GIB) // row.row_bytes
    least, what = (2 * top_k, "two tokens'") if is_fine else (experts, "one layer of")
    if slots < least:
        found = size if isinstance(size, str) else f"{size:.4f}".rstrip("0").rstrip(".")
        raise ConfigError(
            f"{name} is {found} GiB, which holds {slots} experts; wanted at least {what} {least} "
            f"({least * row.row_bytes / GIB:.4f} GiB). {advice or f'Make {name} larger.'}"
        )
    ring = ring_rows(slots, experts)
    if size == "all" or slots >= total + (ring if is_fine else 0):
        slots, ring = total, ring if is_fine else 0
    else:
        slots -= ring
    return PoolShape(layers=layers, experts=experts, top_k=top_k, row=row, slots=slots, ring=ring)
