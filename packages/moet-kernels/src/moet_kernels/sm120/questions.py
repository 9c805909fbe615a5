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
    DECODE,
    GROUP,
    PREFILL,
    THREADS,
    Case,
    addressed_groups,
    launch_parameters,
    make_case,
    mistake,
    result_of,
)
from moet_kernels.sm120.driver import Driver
from moet_kernels.sm120.launches import (
    Vectors,
    launch_combine,
    launch_mark,
    launch_prepare,
    launch_sort,
    tiles_of,
)
from moet_kernels.sm120.write import KERNELS, Kernel
from moet_kernels.sm120.write_tiles import TILES_KERNELS

__all__ = ["QUESTIONS", "Ask", "Result", "held", "tiles_for"]

Result = dict[str, np.ndarray]
Ask = Callable[[Driver, Any], tuple[str | None, Result]]
"""Runs a loaded kernel; returns what is wrong, and what variants of it must agree in."""


@functools.cache
def _case(kernel: Kernel) -> Case:
    """A group of each kind; a last block of rows that is short; columns that warps share unequally.

    Prefill's warps share none, so that fewer columns will do.
    """
    tiles = kernel in TILES_KERNELS
    k = (3 if tiles else 9) * 32 * kernel.steps
    n = (384 if kernel.down else 192) if tiles else 96
    hidden, intermediate = (n, k) if kernel.down else (k, n)
    counts = (16, 0, 5, 9) if tiles else (1, 0, 8, 3)
    shape = hidden, intermediate, counts, 1
    if kernel.codec == "bf16":
        return cases_bf16.make_bf16_case(*shape, down=kernel.down, exact=True, limit=96.0)
    codec, tiling = CODECS[kernel.codec], PREFILL if tiles else DECODE
    return make_case(codec, *shape, down=kernel.down, exact=True, limit=96.0, tiling=tiling)


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
    driver.launch(function, case.grid, case.tiling.threads, parameters, list(tensors.values()))
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


def _routed(driver: Driver, tokens: int) -> tuple[Tensor, np.ndarray, np.ndarray, list[Tier]]:
    """x, ids (7 names no expert, 5 is absent), the slots of two tiers, and the tiers."""
    chance = np.random.default_rng(2)
    x = torch.from_numpy(chance.standard_normal((tokens, 192)).astype(np.float32)).bfloat16()
    ids = np.array([[0, 2, 1, 5], [2, 4, 7, 0], [2, 1, 0, 4]], np.int32)
    ids = np.resize(ids, (tokens, 4))
    layouts = [row_layout(codec, 192, 64) for codec in ("w2", "fp4-mx")]
    tables = np.array([[0, -1, 1, -1, 2, -1], [-1, 0, -1, -1, -1, -1]], np.int32)
    tiers = [
        Tier(driver.empty((3, layout.row_bytes), torch.uint8), _on(driver, table), layout)
        for table, layout in zip(tables, layouts, strict=True)
    ]
    return x, ids, tables, tiers


def _expected(x: Tensor, ids: np.ndarray, tables: np.ndarray) -> Result:
    """What `prepare` and `sort` have to make of `_routed`, but for the groups."""
    codes, scales = quantise(x.float().numpy())
    slots = tables.max(axis=0)
    present = np.array([i < 6 and slots[i] >= 0 for i in ids.flat], np.uint8)
    return {"values": to_fragments(codes), "scales": scales, "present": present}


_WANTED = np.array([1, 1, 1, 0, 1, 1], np.uint8)
_ABSENT = 2  # expert 5, and 7, which does not exist


def _compared(expected: Result, found: Result) -> tuple[str | None, Result]:
    """Say what differs; addresses in groups differ between variants."""
    for name, value in expected.items():
        if (found[name] != value).any():
            return f"{name} are wrong.", found
    return None, {name: value for name, value in found.items() if name != "groups"}


def _ask_prepare(driver: Driver, function: Any) -> tuple[str | None, Result]:
    x, ids, tables, tiers = _routed(driver, 3)
    shape = (ids.size, GROUP.itemsize)
    groups = [driver.empty(shape, torch.uint8).zero_() for _ in tiers]
    values, scales, present = _outputs(driver, x, ids)
    wanted = _on(driver, np.zeros(6, np.uint8))
    missing = _on(driver, np.array([5], np.int64))
    device, made = driver.device, Vectors(values, scales)
    arguments = (x.to(device), _on(driver, ids), tiers, groups, present, made)
    launch_prepare(driver, function, *arguments, missing=missing, wanted=wanted)
    expected = _expected(x, ids, tables)
    expected |= {"wanted": _WANTED, "missing": np.array([5 + _ABSENT], np.int64)}
    expected["groups"] = np.stack(
        [_groups(ids, tiers[i], tables[1] if i == 0 else None) for i in range(2)]
    )
    tensors = {"values": values, "scales": scales, "present": present}
    tensors |= {"wanted": wanted, "missing": missing}
    found: Result = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
    found["groups"] = np.stack([g.cpu().numpy().view(GROUP)[:, 0] for g in groups])
    return _compared(expected, found)


def _ask_sort(driver: Driver, function: Any) -> tuple[str | None, Result]:
    """Experts of 0 to 25 pairs, and more ids of no expert than fill a tile."""
    x, ids, tables, tiers = _routed(driver, 34)
    ids[20:, :2] = 9
    shape = (tiles_of(ids.size, 6), PREFILL.group.itemsize)
    tiles = [driver.empty(shape, torch.uint8) for _ in tiers]
    values, scales, present = _outputs(driver, x, ids)
    arguments = (x.to(driver.device), _on(driver, ids), tiers, tiles, present)
    launch_sort(driver, function, *arguments, Vectors(values, scales))
    tensors = {"values": values, "scales": scales, "present": present}
    found: Result = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
    found["groups"] = np.stack([held(t.cpu().numpy().view(PREFILL.group)[:, 0]) for t in tiles])
    expected = _expected(x, ids, tables)
    expected["groups"] = np.stack(
        [tiles_for(ids, tiers[i], tables[1] if i == 0 else None) for i in range(2)]
    )
    return _compared(expected, found)


def held(tiles: np.ndarray) -> np.ndarray:
    """Tiles with zeros where they hold nothing."""
    tiles = tiles.copy()
    beyond = np.arange(PREFILL.vectors) >= tiles["count"][:, None]
    tiles["pair"][beyond] = tiles["token"][beyond] = 0
    tiles["row"][tiles["count"] == 0] = 0
    return tiles


def tiles_for(ids: np.ndarray, tier: Tier, preferred: np.ndarray | None) -> np.ndarray:
    """What `sort` makes for a tier, as `kernels/sort.cu` describes it."""
    table, base = tier.slot_of.cpu().numpy(), tier.pool.data_ptr()
    tiles = np.zeros(tiles_of(ids.size, len(table)), PREFILL.group)
    flat = ids.reshape(-1)
    for expert in range(len(table)):
        if table[expert] < 0 or (preferred is not None and preferred[expert] >= 0):
            continue
        pairs = np.flatnonzero(flat == expert)
        below = int(((flat >= 0) & (flat < expert)).sum())
        first = below // PREFILL.vectors + expert
        for start in range(0, len(pairs), PREFILL.vectors):
            some = pairs[start : start + PREFILL.vectors]
            tile = tiles[first + start // PREFILL.vectors]
            tile["row"] = base + int(table[expert]) * tier.layout.row_bytes
            tile["count"] = len(some)
            tile["pair"][: len(some)] = some
            tile["token"][: len(some)] = some // ids.shape[1]
    return tiles


def _ask_mark(driver: Driver, function: Any) -> tuple[str | None, Result]:
    _, ids, _, tiers = _routed(driver, 3)
    wanted = _on(driver, np.zeros(6, np.uint8))
    missing = _on(driver, np.array([2**32 - 1], np.int64))
    launch_mark(driver, function, _on(driver, ids), tiers, missing=missing, wanted=wanted)
    expected: Result = {"wanted": _WANTED, "missing": np.array([2**32 - 1 + _ABSENT], np.int64)}
    return _compared(expected, {"wanted": wanted.cpu().numpy(), "missing": missing.cpu().numpy()})


def _outputs(driver: Driver, x: Tensor, ids: np.ndarray) -> list[Tensor]:
    sizes = x.shape, (len(x), x.shape[1] // 32), (ids.size,)
    return [driver.empty(size, torch.uint8) for size in sizes]


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
        for kernel in (*KERNELS, *TILES_KERNELS)
    },
    "prepare": _ask_prepare,
    "sort": _ask_sort,
    "mark": _ask_mark,
    "combine": _ask_combine,
}
"""By kernel."""
