"""The routed experts' computation: sorted grouped matrix products on a GPU, all experts on a CPU.

Both compute, for token t, sum over its experts e of weight[t, e] * down[e] (silu(gate[e] x) *
(up[e] x)). `grouped` touches only the chosen experts and drops no token; `dense` computes every
expert and masks, which is the plainest truth and fast enough for small batches.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

__all__ = ["dense", "grouped"]


class _Permute(torch.autograd.Function):
    """`x[index]` for a permutation: its gradient is a gather too, not an atomic scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse], None, None


class _Dispatch(torch.autograd.Function):
    """Copy each token to its `top_k` places of the sorted order, without atomics in reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x[order // top_k]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        grad = grads[0][inverse]
        return grad.view(-1, ctx.top_k, grad.shape[-1]).sum(1), None, None, None


def grouped(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Run the experts that each token chose.

    Args:
        x: bf16 `[T, H]`.
        weights: float32 `[T, k]`.
        ids: integers `[T, k]`.
        gate_up: bf16 `[E, 2 I, H]`, gate rows first.
        down: bf16 `[E, H, I]`.

    Returns:
        bf16 `[T, H]`.
    """
    top_k = ids.shape[1]
    sorted_ids, order = torch.sort(ids.flatten().to(torch.int32), stable=True)
    inverse = torch.argsort(order)
    ends = torch.arange(1, gate_up.shape[0] + 1, device=x.device, dtype=torch.int32)
    offsets = torch.searchsorted(sorted_ids, ends, out_int32=True)
    rows = _Dispatch.apply(x, order, inverse, top_k)
    gate, up = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=offsets).chunk(2, -1)
    rows = torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=offsets)
    rows = _Permute.apply(rows, inverse, order).view(*ids.shape, -1)
    return (rows.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def dense(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Compute the same as `grouped` by running every expert on every token."""
    share = torch.zeros(x.shape[0], gate_up.shape[0], device=x.device).scatter(1, ids, weights)
    gate, up = torch.einsum("th,enh->ten", x, gate_up).chunk(2, -1)
    rows = F.silu(gate) * up * share.unsqueeze(-1).to(x.dtype)
    return torch.einsum("tei,ehi->th", rows, down)
