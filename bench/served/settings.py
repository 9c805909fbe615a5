"""The plugin's settings for pools of a chosen share of a model's experts."""

import json
from pathlib import Path
from typing import Any

import msgspec

from moet_core.row import row_layout

__all__ = ["GATE_ALWAYS", "PROCESSES", "Experts", "read_experts"]

GIB = 2**30

PROCESSES: dict[str, dict[str, str]] = {
    "environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    "engine": {"distributed_executor_backend": "mp"},
}
"""Scheduler and worker in processes of their own, as they are in a server with several GPUs: a step
is scheduled and its answers are handed out while the worker runs the next one."""

GATE_ALWAYS = {"gate": "max_prob", "tau": 1.0, "gate_passes": 0}
"""A gate that fires at every step, as often as it takes: all experts at FP4."""


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """The routed experts of a checkpoint."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int

    @property
    def rows(self) -> int:
        """Experts of all layers."""
        return self.layers * self.experts

    def row_bytes(self, codec: str) -> int:
        """Return the bytes of one expert."""
        return row_layout(codec, self.hidden, self.intermediate).row_bytes

    def gib(self, rows: float, codec: str = "w2") -> float:
        """Return the GiB that hold so many experts, and not one more."""
        return (int(rows) + 0.5) * self.row_bytes(codec) / GIB

    def pool(self, share: float) -> dict[str, Any]:
        """Return a pool for a share of the experts; one layer's at least."""
        return {"pool": self.gib(max(self.experts, share * self.rows)), "report_seconds": 0}

    def arena(self, share: float) -> dict[str, Any]:
        """Return an arena for a share of the experts."""
        return {"host_store": "arena", "arena": self.gib(max(self.experts, share * self.rows))}

    def fine(self, share: float) -> dict[str, Any]:
        """Return a fine tier for a share of the experts of an NVFP4 checkpoint."""
        return {"fine": self.gib(max(2 * self.top_k, share * self.rows), "fp4-nv")}


def read_experts(model: Path) -> Experts:
    """Read what a checkpoint's config says of its experts."""
    config = json.loads((model / "config.json").read_text())
    return Experts(
        layers=config["num_hidden_layers"] - config["first_k_dense_replace"],
        experts=config["n_routed_experts"],
        top_k=config["num_experts_per_tok"],
        hidden=config["hidden_size"],
        intermediate=config["moe_intermediate_size"],
    )
