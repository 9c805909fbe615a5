"""Muon for matrices, AdamW for the rest, with every step of the schedule a plain number."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from tinymoe.model import TinyMoe

__all__ = ["Optimizer"]

# Quintic Newton-Schulz: the coefficients of the public Muon write-up by Keller Jordan (2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
MOMENTUM = 0.95
BETAS, EPSILON = (0.9, 0.98), 1e-10


class _Matrices(NamedTuple):
    """A parameter seen as matrices `[B, small, large]`."""

    parameter: nn.Parameter
    halves: int  # stacked gate and up are two matrices
    tall: bool

    def view(self, tensor: Tensor) -> Tensor:
        rows, columns = tensor.shape[-2:]
        flat = tensor.reshape(-1, rows // self.halves, columns)
        return flat.mT if self.tall else flat

    def restore(self, matrices: Tensor) -> Tensor:
        return (matrices.mT if self.tall else matrices).reshape(self.parameter.shape)


def _orthogonalise(matrices: Tensor) -> Tensor:
    """Return about the nearest semi-orthogonal matrix to each of `[B, small, large]`, in bf16."""
    a, b, c = COEFFICIENTS
    x = matrices.to(torch.bfloat16)
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x


class Optimizer:
    """Owns the optimiser's state; `step` applies `.grad` and clears it.

    All state, the step count too, lives in tensors, so that a CUDA graph can replay `step`.
    """

    def __init__(
        self, model: TinyMoe, muon_rate: float, adam_rate: float, decay: float, compiled: bool
    ) -> None:
        self.muon_rate, self.decay = muon_rate, decay
        stacks: dict[tuple[int, ...], list[_Matrices]] = {}
        self.others: list[tuple[nn.Parameter, float, Tensor, Tensor]] = []
        for name, parameter in model.named_parameters():
            table = "embed_tokens" in name or "lm_head" in name
            if table or parameter.ndim == 1 or name.endswith("gate.weight"):
                state = torch.zeros_like(parameter.detach()), torch.zeros_like(parameter.detach())
                self.others.append((parameter, (2 if table else 1) * adam_rate, *state))
                continue
            halves = 2 if name.endswith("gate_up") else 1
            rows, columns = parameter.shape[-2] // halves, parameter.shape[-1]
            matrices = _Matrices(parameter, halves, rows > columns)
            stacks.setdefault(tuple(sorted((rows, columns))), []).append(matrices)
        self.stacks = list(stacks.values())
        self.momenta = [
            torch.zeros_like(torch.cat([item.view(item.parameter.detach()) for item in stack]))
            for stack in self.stacks
        ]
        self.count = torch.zeros((), device=model.lm_head.weight.device)
        self.orthogonalise = torch.compile(_orthogonalise) if compiled else _orthogonalise

    @torch.no_grad()
    def step(self, scale: Tensor) -> None:
        """Update all parameters at `scale` (a number on their device) times the peak rates."""
        for stack, momentum in zip(self.stacks, self.momenta, strict=True):
            self._muon(stack, momentum, scale * self.muon_rate)
        self.count += 1
        for parameter, rate, mean, square in self.others:
            self._adam(parameter, mean, square, scale * rate)

    def _muon(self, stack: list[_Matrices], momentum: Tensor, rate: Tensor) -> None:
        grads = torch.cat([item.view(item.parameter.grad) for item in stack])
        momentum.lerp_(grads, 1 - MOMENTUM)
        update = self.orthogonalise(grads.lerp(momentum, MOMENTUM)).float()
        start = 0
        for item in stack:
            parameter = item.parameter
            count = parameter.numel() // (update.shape[1] * update.shape[2])
            part = item.restore(update[start : start + count])
            start += count
            gain = (update.shape[2] / update.shape[1]) ** 0.5 if item.tall else 1.0
            parameter.mul_(1 - rate * self.decay)
            parameter.sub_(part * (rate * gain))
            parameter.grad = None

    def _adam(self, parameter: nn.Parameter, mean: Tensor, square: Tensor, rate: Tensor) -> None:
        grad = parameter.grad
        mean.lerp_(grad, 1 - BETAS[0])
        square.lerp_(grad.square(), 1 - BETAS[1])
        corrected = (square / (1 - BETAS[1] ** self.count)).sqrt_().add_(EPSILON)
        parameter.sub_(mean / corrected * (rate / (1 - BETAS[0] ** self.count)))
        parameter.grad = None
