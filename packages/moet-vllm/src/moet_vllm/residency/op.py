"""The expert layer as an operation that finds its pool by the layer's name.

Compiled graphs keep the name, not the pool: it can be made after they are traced, and streaming
is decided when a step runs.
"""

import torch
from torch import Tensor

from moet_vllm.residency.resident import ResidentExperts

__all__ = ["bind", "resident_experts", "unbind"]

_layers: dict[str, tuple[ResidentExperts, int]] = {}


def bind(names: list[str], resident: ResidentExperts) -> None:
    """Let the layers `names`, in the order of the rank's layers, run over a pool from now on."""
    _layers.update({name: (resident, number) for number, name in enumerate(names)})


def unbind(resident: ResidentExperts) -> None:
    """Forget the layers of a pool."""
    for name in [name for name, (owner, _) in _layers.items() if owner is resident]:
        del _layers[name]


@torch.library.custom_op("moet::resident_experts", mutates_args=())
def resident_experts(
    x: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer: str, swiglu_limit: float
) -> Tensor:
    """Return the weighted sum of each token's experts, [T, H] in x's dtype.

    Args:
        x: bfloat16 or float32 [T, H].
        topk_weights: float32 [T, k].
        topk_ids: integer [T, k].
        layer: Name of the layer, as bound.
        swiglu_limit: L > 0 clamps as in `moet_kernels.experts`; 0 does not.
    """
    resident, number = _layers[layer]
    return resident.run_layer(number, x, topk_weights, topk_ids, swiglu_limit or None)


@resident_experts.register_fake
def _(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer: str, swiglu_limit: float) -> Tensor:
    return torch.empty_like(x)
