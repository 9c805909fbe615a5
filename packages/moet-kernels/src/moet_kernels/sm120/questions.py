"""Questions with known answers for the SM120 kernels, put to a driver.

Decode kernels are asked with data of which every partial sum is a float32, so that the answer does
not depend on how the matrix unit rounds.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moet_core.row import row_layout
from moet_kernels.portable.tier import Tier
from moet_kernels.sm120 import cases_bf16
from moet_kernels.sm120.activations import quantise, to_fragments
from moet_kernels.sm120.cases import (
    CODECS,
    GROUP,
    THREADS,
    Case,
    addressed_groups,
    launch_parameters,
    make_case,
    mistake,
    result_of,
)
from moet_kernels.sm120.driver import Driver
from moet_kernels.sm120.layer import Vectors, launch_combine, launch_prepare
from moet_kernels.sm120.write import KERNELS, Kernel

__all__ = ["QUESTIONS", "Ask", "Result"]

Result = dict[str, np.ndarray]
Ask = Callable[[Driver, Any], tuple[str | None, Result]]
"""Runs a loaded kernel; returns what is wrong, and what variants of it must agree in."""


@functools.cache
def _case(kernel: Kernel) -> Case:
    """Nine column blocks, so that warps differ; a group of each kind; a last tile that is short."""
    k = 9 * 32 * kernel.steps
    hidden, intermediate = (96, k) if kernel.down else (k, 96)
    shape = hidden, intermediate, (1, 0, 8, 3), 1
    if kernel.codec == "bf16":
        return cases_bf16.make_bf16_case(*shape, down=kernel.down, exact=True, limit=96.0)
    return make_case(CODECS[kernel.codec], *shape, down=kernel.down, exact=True, limit=96.0)


def _ask(kernel: Kernel, driver: Driver, function: Any) -> tuple[str | None, Result]:
    case = _case(kernel)
    pairs, n = case.expected.shape
    rows = _on(driver, case.rows)
    groups = addressed_groups(case, rows.data_ptr())
    out = driver.empty((pairs * n * (4 if case.down else 1),), torch.uint8)
    out_scales = driver.empty((0 if case.down else pairs * n // 32,), torch.uint8)
    tensors = {
        "groups": _on(driver, groups.view(np.uint8)),
        "vectors": _on(driver, case.vectors),
        "scales": _on(driver, case.scales),
        "out": out,
        "out_scales": out_scales,
        "rows": rows,
    }
    parameters = launch_parameters(case, {name: t.data_ptr() for name, t in tensors.items()})
    driver.launch(function, case.grid, THREADS, parameters, list(tensors.values()))
    found = result_of(case, out.cpu().numpy(), out_scales.cpu().numpy())
    return mistake(case, found), found


def _ask_bf16(kernel: Kernel, driver: Driver, function: Any) -> tuple[str | None, Result]:
    case = _case(kernel)
    rows = _on(driver, case.rows)
    groups = _on(driver, addressed_groups(case, rows.data_ptr()).view(np.uint8))
    vectors = _on(driver, case.vectors.view(np.uint8))
    out = driver.empty((case.expected.size * (4 if case.down else 2),), torch.uint8)
    addresses = {"groups": groups.data_ptr(), "vectors": vectors.data_ptr(), "out": out.data_ptr()}
    parameters = launch_parameters(case, addresses | {"scales": 0, "out_scales": 0})
    driver.launch(function, case.grid, THREADS, parameters, [groups, vectors, out, rows])
    found = cases_bf16.result_of(case, out.cpu().numpy())
    return cases_bf16.mistake(case, found), found


def _on(driver: Driver, array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(driver.device)


def _ask_prepare(driver: Driver, function: Any) -> tuple[str | None, Result]:
    tokens, hidden = 3, 192
    chance = np.random.default_rng(2)
    x = torch.from_numpy(chance.standard_normal((tokens, hidden)).astype(np.float32)).bfloat16()
    ids = np.array([[0, 2, 1, 5], [2, 4, 7, 0], [2, 1, 0, 4]], np.int32)
    layouts = [row_layout(codec, hidden, 64) for codec in ("w2", "fp4-mx")]
    tables = np.array([[0, -1, 1, -1, 2, -1], [-1, 0, -1, -1, -1, -1]], np.int32)
    pools = [driver.empty((3, layout.row_bytes), torch.uint8) for layout in layouts]
    tiers = [
        Tier(pool, _on(driver, table), layout)
        for pool, table, layout in zip(pools, tables, layouts, strict=True)
    ]
    shape = (ids.size, GROUP.itemsize)
    groups = [driver.empty(shape, torch.uint8).zero_() for _ in tiers]
    sizes = (tokens, hidden), (tokens, hidden // 32), (ids.size,)
    values, scales, present = (driver.empty(size, torch.uint8) for size in sizes)
    wanted = _on(driver, np.zeros(6, np.uint8))
    missing = _on(driver, np.array([5], np.int64))
    launch_prepare(
        driver,
        function,
        x.to(driver.device),
        _on(driver, ids),
        tiers,
        groups,
        present,
        Vectors(values, scales),
        missing=missing,
        wanted=wanted,
    )
    right, right_scales = quantise(x.float().numpy())
    expected: Result = {"values": to_fragments(right), "scales": right_scales}
    slots = tables.max(axis=0)
    expected["present"] = np.array([i < 6 and slots[i] >= 0 for i in ids.flat], np.uint8)
    expected["wanted"] = np.array([1, 1, 1, 0, 1, 1], np.uint8)
    expected["missing"] = np.array([5 + 2], np.int64)  # expert 5, and 7, which does not exist
    expected["groups"] = np.stack(
        [_groups(ids, tiers[i], tables[1] if i == 0 else None) for i in range(2)]
    )
    made = {"values": values, "scales": scales, "present": present}
    found: Result = {name: tensor.cpu().numpy() for name, tensor in made.items()}
    found |= {"wanted": wanted.cpu().numpy(), "missing": missing.cpu().numpy()}
    found["groups"] = np.stack([g.cpu().numpy().view(GROUP)[:, 0] for g in groups])
    for name, value in expected.items():
        if (found[name] != value).any():
            return f"{name} are wrong.", found
    del found["groups"]  # addresses differ between variants
    return None, found


def _groups(ids: np.ndarray, tier: Tier, preferred: np.ndarray | None) -> np.ndarray:
    """What `prepare` makes of at most 8 pairs an expert; zeros where it writes nothing."""
    groups = np.zeros(ids.size, GROUP)
    table, base = tier.slot_of.cpu().numpy(), tier.pool.data_ptr()
    flat = ids.reshape(-1)
    for expert in range(len(table)):
        if table[expert] < 0 or (preferred is not None and preferred[expert] >= 0):
            continue
        pairs = np.flatnonzero(flat == expert)
        if len(pairs):
            group = groups[pairs[0]]
            group["row"] = base + int(table[expert]) * tier.layout.row_bytes
            group["count"] = len(pairs)
            group["pair"][: len(pairs)] = pairs
            group["token"][: len(pairs)] = pairs // ids.shape[1]
    return groups


def _ask_combine(driver: Driver, function: Any) -> tuple[str | None, Result]:
    tokens, hidden, top_k = 2, 1056, 3
    chance = np.random.default_rng(3)
    parts = torch.from_numpy(chance.standard_normal((tokens * top_k, hidden)).astype(np.float32))
    weights = torch.from_numpy(chance.random((tokens, top_k)).astype(np.float32))
    present = torch.tensor([1, 1, 1, 0, 1, 0], dtype=torch.uint8)
    parts[present == 0] = torch.nan
    total = torch.zeros(tokens, hidden)
    for k in range(top_k):
        product = parts.view(tokens, top_k, hidden)[:, k] * weights[:, k, None]
        total = torch.where(present.view(tokens, top_k)[:, k, None] > 0, total + product, total)
    out = driver.empty((tokens, hidden), torch.bfloat16)
    on = driver.device
    launch_combine(driver, function, parts.to(on), weights.to(on), present.to(on), out)
    found = out.cpu()
    flaw = None if torch.equal(found, total.bfloat16()) else "the weighted sums are wrong."
    return flaw, {"out": found.view(torch.int16).numpy()}


QUESTIONS: dict[str, Ask] = {
    **{
        kernel.name: functools.partial(_ask_bf16 if kernel.codec == "bf16" else _ask, kernel)
        for kernel in KERNELS
    },
    "prepare": _ask_prepare,
    "combine": _ask_combine,
}
"""By kernel."""
