"""Cases for the portable kernels: random rows and batches, and the operation in float64."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moet_core.row import decode_row, row_layout
from moet_kernels.experts import Tier, experts
from moet_kernels.portable.interpret import call, interpreter_process


def random_rows(codec, hidden, intermediate, count, seed=0, exponents=(118, 124), device="cpu"):
    """Rows whose every code, and every scale byte of a range of exponents, is random."""
    layout = row_layout(codec, hidden, intermediate)
    generator = torch.Generator(device).manual_seed(seed)

    def bytes_of(low, high, *shape):
        options = {"generator": generator, "dtype": torch.uint8, "device": device}
        return torch.randint(low, high, shape, **options)

    rows = bytes_of(0, 256, count, layout.row_bytes)
    low, high = (40, 72) if codec == "fp4-nv" else exponents  # as e4m3: 2^-2 to 2^2
    for section in (layout.scales13, layout.scales2):
        rows[:, section.slice] = bytes_of(low, high + 1, count, section.length)
    if layout.tensor_scales.length:
        scales = torch.rand(count, 4, generator=generator, device=device) * 0.02 + 0.01
        rows[:, layout.tensor_scales.slice] = scales.view(torch.uint8)
    return rows


@dataclass
class Case:
    """Arguments of `experts`; `ids` are distinct within a token unless they are given."""

    tokens: int = 4
    codec: str = "w2"
    hidden: int = 64
    intermediate: int = 32
    experts: int = 6
    top_k: int = 3
    slots: list[int] | None = None
    fine_codec: str | None = None
    fine_slots: list[int] | None = None
    limit: float | None = None
    seed: int = 0
    ids: Any = None
    rows: Any = None
    token: int | None = None
    x: Tensor = field(init=False)
    weights: Tensor = field(init=False)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        self.x = torch.randn(self.tokens, self.hidden, generator=generator).bfloat16()
        self.weights = torch.rand(self.tokens, self.top_k, generator=generator)
        scores = torch.rand(self.tokens, self.experts, generator=generator)
        if self.ids is None:
            self.ids = scores.topk(self.top_k).indices
        if self.slots is None:
            self.slots = list(range(self.experts))
        if self.rows is None:
            sizes = (self.hidden, self.intermediate, self.experts)
            self.rows = random_rows(self.codec, *sizes, seed=self.seed)

    @property
    def base(self):
        return self.tier(self.rows, self.slots, self.codec)

    @property
    def fine(self):
        if self.fine_codec is None:
            return None
        sizes = (self.hidden, self.intermediate, self.experts)
        return self.tier(
            random_rows(self.fine_codec, *sizes, seed=99), self.fine_slots, self.fine_codec
        )

    def tier(self, rows, slots, codec):
        """Put the row of each expert into its slot, and poison into the others."""
        pool = torch.full_like(rows, 0xFF)
        for expert, slot in enumerate(slots):
            if slot >= 0:
                pool[slot] = rows[expert]
        layout = row_layout(codec, self.hidden, self.intermediate)
        return Tier(pool, torch.tensor(slots, dtype=torch.int32), layout)

    def only(self, token):
        """The same case for one of its tokens."""
        one = replace(self, tokens=1, ids=self.ids[token : token + 1])
        one.x, one.weights = self.x[token : token + 1], self.weights[token : token + 1]
        return one

    def float64(self):
        """The whole operation in float64, nothing rounded, from golden weights."""
        out = np.zeros((self.tokens, self.hidden))
        base, fine = self.base, self.fine
        for token, (x, weights, ids) in enumerate(
            zip(self.x.double().numpy(), self.weights.tolist(), self.ids.tolist(), strict=True)
        ):
            for weight, expert in zip(weights, ids, strict=True):
                tier = fine if fine is not None and fine.slot_of[expert] >= 0 else base
                if tier.slot_of[expert] < 0:
                    continue
                row = tier.pool[tier.slot_of[expert]].numpy()
                w13, w2 = decode_row(tier.layout, row)
                gate, up = np.split(w13 @ x, 2)
                if self.limit:
                    gate, up = np.minimum(gate, self.limit), np.clip(up, -self.limit, self.limit)
                out[token] += weight * (w2 @ (gate / (1 + np.exp(-gate)) * up))
        return out

    def arguments(self):
        base = self.base
        options = {
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "codec": self.codec,
            "swiglu_limit": self.limit,
            "missing": torch.tensor([100], dtype=torch.int32),
            "wanted": torch.zeros(self.experts, dtype=torch.uint8),
            "fine": self.fine,
        }
        return (self.x, self.weights, self.ids, base.pool, base.slot_of), options


@dataclass
class Found:
    """What a backend gave: the result, absent experts counted, experts marked as wanted."""

    out: Tensor
    missing: int
    wanted: list[int]


@pytest.fixture(scope="session")
def process():
    with interpreter_process() as process:
        yield process


@pytest.fixture
def portable(process):
    """Run the portable backend on a case, on the CPU."""

    def run(case):
        args, options = case.arguments()
        options["backend"] = "portable"
        out, _, options = process.submit(call, experts, args, options).result()
        return Found(out, options["missing"].item() - 100, options["wanted"].tolist())

    return run


@pytest.fixture
def reference():
    """Run the reference backend on a case."""

    def run(case):
        args, options = case.arguments()
        out = experts(*args, **options, backend="reference")
        return Found(out, options["missing"].item() - 100, options["wanted"].tolist())

    return run


@pytest.fixture
def case():
    return Case


@pytest.fixture
def rows():
    return random_rows


def relative_error(found, wanted):
    """Return ||found - wanted|| / ||wanted||."""
    wanted = torch.as_tensor(wanted)
    error = (found.double() - wanted).norm() / wanted.norm()
    return float("inf") if torch.isnan(error) else float(error)


@pytest.fixture
def error():
    return relative_error
