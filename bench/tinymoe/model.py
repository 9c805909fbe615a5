"""Glm4Moe in plain torch, with the parameter names of its checkpoints.

Matches vLLM's glm4_moe and glm4_moe_mtp: RMSNorm before attention and MLP, per-head RMSNorm of q
and k, rotary positions on the first half of each head, a first dense layer, then routed experts
(sigmoid scores, correction bias, normalised top-k) beside a shared expert; one MTP layer reads the
model's normalised output and the next token's embedding. Activations are bf16, routing is fp32.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tinymoe import experts as expert_ops
from tinymoe.nvfp4 import fake_quantise, fake_w2
from tinymoe.shape import Shape

__all__ = ["GRIDS", "TinyMoe", "rms_norm"]

BF16 = torch.bfloat16
# What becomes of the experts' weights before they are used.
GRIDS: dict[str, Callable[[Tensor], Tensor]] = {
    "full": lambda weight: weight,
    "nvfp4": fake_quantise,
    "w2": fake_w2,
}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension in fp32, return bf16."""
    full = x.float()
    return (full * torch.rsqrt(full.square().mean(-1, keepdim=True) + eps) * weight.to(BF16)).to(
        BF16
    )


def _linear(rows: int, columns: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=False)
    nn.init.normal_(layer.weight, std=gain * 0.5 / columns**0.5)
    return layer


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend causally; on a GPU with the one backend whose backward pass has a fixed order."""
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _apply(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight.to(BF16))


class Norm(nn.Module):
    """A learned gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`."""
        return rms_norm(x, self.weight, self.eps)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = _linear(intermediate, hidden)
        self.up_proj = _linear(intermediate, hidden)
        self.down_proj = _linear(hidden, intermediate, gain=0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[T, H]` to `[T, H]`."""
        return _apply(self.down_proj, F.silu(_apply(self.gate_proj, x)) * _apply(self.up_proj, x))


class Gate(nn.Module):
    """The router; its correction bias takes part in the choice only."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape.experts, shape.hidden) / shape.hidden**0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.experts))
        self.top_k = shape.top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights float32 `[T, k]` and expert ids `[T, k]` of bf16 `[T, H]`."""
        scores = torch.sigmoid(F.linear(x.float(), self.weight.to(BF16).float()))
        ids = torch.topk(scores.detach() + self.e_score_correction_bias, self.top_k, dim=-1)[1]
        # A sum with a one-hot, not a gather: its gradient needs no atomic additions.
        numbers = torch.arange(scores.shape[1], device=x.device)
        chosen = (scores.unsqueeze(1) * (ids.unsqueeze(2) == numbers)).sum(-1)
        return chosen / chosen.sum(-1, keepdim=True), ids


class Experts(nn.Module):
    """All routed experts of a layer, stacked."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size = (shape.experts, 2 * shape.intermediate, shape.hidden)
        self.gate_up = nn.Parameter(torch.randn(size) * 0.5 / shape.hidden**0.5)
        self.down = nn.Parameter(torch.zeros(shape.experts, shape.hidden, shape.intermediate))


class Moe(nn.Module):
    """Routed experts and the shared one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = Gate(shape)
        self.experts = Experts(shape)
        self.shared_experts = Mlp(shape.hidden, shape.intermediate)
        self.numbers = shape.experts

    def forward(self, x: Tensor, experts: str) -> tuple[Tensor, Tensor]:
        """Return the output `[T, H]` and the tokens that each expert served, float32 `[E]`."""
        weights, ids = self.gate(x)
        gate_up, down = self.experts.gate_up, self.experts.down
        grid = GRIDS[experts]
        gate_up, down = grid(gate_up), grid(down)
        run = expert_ops.grouped if x.is_cuda else expert_ops.dense
        routed = run(x, weights, ids, gate_up.to(BF16), down.to(BF16))
        numbers = torch.arange(self.numbers, device=x.device)
        load = (ids.unsqueeze(2) == numbers).sum((0, 1)).float()
        return routed + self.shared_experts(x), load


class Attention(nn.Module):
    """Grouped-query attention with q and k normalised per head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = _linear(shape.heads * shape.head_dim, shape.hidden)
        self.k_proj = _linear(shape.kv_heads * shape.head_dim, shape.hidden)
        self.v_proj = _linear(shape.kv_heads * shape.head_dim, shape.hidden)
        self.o_proj = _linear(shape.hidden, shape.heads * shape.head_dim, gain=0.0)
        self.q_norm = Norm(shape.head_dim, shape.norm_eps)
        self.k_norm = Norm(shape.head_dim, shape.norm_eps)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v, each `[T, heads, head_dim]`; k and v repeated for their queries."""
        size = self.shape.head_dim
        q = self.q_norm(_apply(self.q_proj, x).unflatten(-1, (-1, size)))
        k = self.k_norm(_apply(self.k_proj, x).unflatten(-1, (-1, size)))
        v = _apply(self.v_proj, x).unflatten(-1, (-1, size))
        repeat = self.shape.heads // self.shape.kv_heads
        k = _rotate(k, cos, sin).repeat_interleave(repeat, 1)
        return _rotate(q, cos, sin), k, v.repeat_interleave(repeat, 1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to the first dimensions of each head, in NeoX order."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((turned[0].to(BF16), turned[1].to(BF16), rest), -1)


class Layer(nn.Module):
    """A decoder layer; attention itself stays outside what torch.compile sees."""

    def __init__(self, shape: Shape, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.mlp: Any = Mlp(shape.hidden, shape.dense_intermediate) if dense else Moe(shape)
        self.dense = dense

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v of `[T, H]`."""
        return self.self_attn.project(self.input_layernorm(x), cos, sin)

    def after(self, x: Tensor, attended: Tensor, experts: str) -> tuple[Tensor, Tensor]:
        """Finish the layer: the new `[T, H]` and the experts' loads (empty if dense)."""
        x = x + _apply(self.self_attn.o_proj, attended)
        middle = self.post_attention_layernorm(x)
        if self.dense:
            return x + self.mlp(middle), torch.zeros(0, device=x.device)
        update, load = self.mlp(middle, experts)
        return x + update, load

    def forward(
        self, x: Tensor, rows: int, cos: Tensor, sin: Tensor, experts: str
    ) -> tuple[Tensor, Tensor]:
        """Run the layer on `rows` causal sequences laid end to end in `x` `[T, H]`."""
        q, k, v = (
            part.unflatten(0, (rows, -1)).transpose(1, 2) for part in self.before(x, cos, sin)
        )
        attended = _attend(q, k, v)
        return self.after(x, attended.transpose(1, 2).flatten(2).flatten(0, 1), experts)


class Mtp(Layer):
    """The layer that drafts one token ahead."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, dense=False)
        self.enorm = Norm(shape.hidden, shape.norm_eps)
        self.hnorm = Norm(shape.hidden, shape.norm_eps)
        self.eh_proj = _linear(shape.hidden, 2 * shape.hidden)
        self.shared_head = nn.ModuleDict({"norm": Norm(shape.hidden, shape.norm_eps)})

    def join(self, hidden: Tensor, embedded: Tensor, positions: Tensor) -> Tensor:
        """Combine the model's output at i with the embedding of token i + 1.

        vLLM's glm4_moe_mtp hides the embedding at position 0; so does this.
        """
        embedded = torch.where(positions.unsqueeze(-1) == 0, 0, embedded)
        return _apply(self.eh_proj, torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))


class TinyMoe(nn.Module):
    """The whole model; `model.*` and `lm_head` are named as in the checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        layers = [Layer(shape, index < shape.dense_layers) for index in range(shape.layers)]
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(shape.vocabulary, shape.hidden),
                "layers": nn.ModuleList([*layers, Mtp(shape)]),
                "norm": Norm(shape.hidden, shape.norm_eps),
            }
        )
        self.lm_head = _linear(shape.vocabulary, shape.hidden)
        nn.init.normal_(self.model["embed_tokens"].weight, std=0.5)
        size = int(shape.head_dim * shape.rotary)
        powers = torch.arange(0, size, 2).float() / size
        angles = torch.outer(torch.arange(shape.positions).float(), shape.rope_theta**-powers)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    @property
    def moe_layers(self) -> list[Moe]:
        """The layers with routed experts, the MTP layer's last."""
        return [layer.mlp for layer in self.model["layers"] if not layer.dense]

    def forward(self, tokens: Tensor, experts: str = "full") -> tuple[Tensor, Tensor, Tensor]:
        """Run the model and its MTP layer.

        Args:
            tokens: integers `[B, L]`.
            experts: a key of `GRIDS`.

        Returns:
            the normalised hidden state at i (for token i + 1), that of the MTP layer (for token
            i + 2), both bf16 `[B * L, H]`, and the loads float32 `[moe layers, E]`. The last
            two positions of a row mean nothing for the MTP layer.
        """
        rows, length = tokens.shape
        embedded = F.embedding(tokens, self.model["embed_tokens"].weight).to(BF16)
        cos = self.cos[:length].repeat(rows, 1)
        sin = self.sin[:length].repeat(rows, 1)
        x, loads = embedded.flatten(0, 1), []
        *layers, mtp = self.model["layers"]
        for layer in layers:
            x, load = layer(x, rows, cos, sin, experts)
            loads.append(load)
        hidden = self.model["norm"](x)
        following = torch.cat((embedded[:, 1:], embedded[:, :1]), 1).flatten(0, 1)
        positions = torch.arange(length, device=tokens.device).repeat(rows)
        x = mtp.join(hidden, following, positions)
        x, load = mtp(x, rows, cos, sin, experts)
        drafted = mtp.shared_head["norm"](x)
        return hidden, drafted, torch.stack([*(load for load in loads if load.numel()), load])

    def logits(self, hidden: Tensor) -> Tensor:
        """Return bf16 logits `[T, vocabulary]`."""
        return _apply(self.lm_head, hidden)
