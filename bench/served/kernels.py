"""Which GPU kernels of a decode step belong to the routed experts."""

import re
from collections.abc import Mapping

__all__ = ["expert_time", "is_of_experts"]

OURS = re.compile(
    r"(mark|count|sort|combine|arrange|prepare|((w2|fp4|nv)_)?(gate_up|down))(_|$)", re.ASCII
)
"""Beginnings of the names of `moet_kernels`' kernels: Triton's, CUDA's and those of SM120."""

STOCK = ("marlin", "moe_align", "moe_sum", "count_and_sort_expert")
"""Parts of the names of vLLM's kernels for FP4 experts. The activation between its two GEMMs has
the name of the shared expert's, and is not counted."""


def is_of_experts(name: str) -> bool:
    """Tell whether a kernel is one of the routed experts'; routing itself is not."""
    lowered = name.lower()
    return bool(OURS.match(name)) or any(part in lowered for part in STOCK)


def expert_time(kernels: Mapping[str, float]) -> float:
    """Add up the time of the experts' kernels, in the unit of the values."""
    return sum(time for name, time in kernels.items() if is_of_experts(name))
