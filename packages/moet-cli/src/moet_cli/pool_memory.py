"""Host memory that a pool of experts takes: pinned rows and arenas, known before a start."""

import json
from pathlib import Path

from moet_core.geometry import ModelGeometry, geometry_from_config
from moet_core.row import row_layout
from moet_vllm.config import MoetConfig

__all__ = ["host_memory"]

GIB = 2**30

FP4 = "fp4-mx"


def host_memory(
    config: MoetConfig, folder: Path | None, *, tensor_parallel: int, ranks: int, on_cpu: bool
) -> dict[str, int]:
    """Return the bytes on this machine by what they are for, of all ranks together.

    Args:
        config: The plugin's settings.
        folder: The checkpoint; None if it is not here yet, and what follows from its sizes is not
            known.
        tensor_parallel: Ranks that share the experts of a layer.
        ranks: All ranks, of tensor and pipeline parallelism.
        on_cpu: The pool lies in the host's memory too.
    """
    if not config.is_resident:
        return {}
    found: dict[str, int] = {}
    rows = _rows(config, folder, tensor_parallel) if folder is not None else {}
    tiers = ["base"] if config.fine is None else ["base", "fine"]
    most = {tier: rows.get(tier, ranks * 2**63) for tier in tiers}
    for tier, size in zip(tiers, (config.arena, config.fine_arena), strict=False):
        if size is not None:
            found[f"{tier} arena"] = min(int(size * GIB) * ranks, most[tier])
        elif (not config.packs or config.host_store == "pinned") and rows:
            found[f"{tier} rows, pinned"] = rows[tier]
    if on_cpu:
        for tier, pool in zip(tiers, (config.pool, config.fine), strict=False):
            if isinstance(pool, int | float):
                found[f"{tier} pool"] = min(int(pool * GIB) * ranks, most[tier])
            elif rows:
                found[f"{tier} pool"] = rows[tier]
    return found


def _rows(config: MoetConfig, folder: Path, tensor_parallel: int) -> dict[str, int]:
    """Return the bytes of each tier's rows, of all ranks; of the smaller one of two FP4 codecs."""
    geometry = geometry_from_config(json.loads((folder / "config.json").read_text()))
    codecs = {"base": "w2" if config.experts == "w2" else FP4, "fine": FP4}
    return {tier: _tier(geometry, codec, tensor_parallel) for tier, codec in codecs.items()}


def _tier(geometry: ModelGeometry, codec: str, tensor_parallel: int) -> int:
    row = row_layout(codec, geometry.hidden, geometry.intermediate // tensor_parallel)
    count = len(geometry.moe_layers) * geometry.experts
    return count * row.row_bytes * tensor_parallel
