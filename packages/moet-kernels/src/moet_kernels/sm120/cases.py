"""Launches of the expert kernels on random experts, with what their stated arithmetic gives.

The stated arithmetic, in float64 here: products of weights and quantised vectors are exact, so are
their sums; gate and up are clamped, activated as silu(gate) * up, and quantised as `activations`
says. What a kernel gives may differ from it by rounding: float32 sums, and one E4M3 step where a
value is within the same distance of the middle between two.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from moet_core.codecs import get_codec
from moet_core.floats import E4M3_VALUES, e8m0_to_float64, float64_to_e4m3
from moet_core.layout import pack_codes2, pack_nibbles, pack_scales
from moet_core.row import RowLayout, decode_row, row_layout
from moet_kernels.sass.emulate import Launch, emulate
from moet_kernels.sass.machine import Buffer
from moet_kernels.sass.source import Program
from moet_kernels.sm120.activations import (
    dequantise,
    from_fragments,
    quantise,
    scale_bytes,
    steps_of,
    to_fragments,
)

__all__ = [
    "CODECS",
    "DECODE",
    "DOWN_ROWS",
    "GATE_UP_ROWS",
    "GROUP",
    "PREFILL",
    "THREADS",
    "TOLERANCE",
    "Case",
    "Tiling",
    "addressed_groups",
    "expected_of",
    "launch_of",
    "launch_parameters",
    "make_case",
    "mistake",
    "result_of",
    "run_case",
]

CODECS = {"w2": "w2", "fp4": "fp4-mx", "nv": "fp4-nv"}
"""Codec of a family of kernels."""

GATE_UP_ROWS = 32
"""Rows of each of gate and up that a block of threads computes in decode."""

DOWN_ROWS = 64
"""Rows of the down projection that a block of threads computes in decode."""

THREADS = 256
"""Of a block, in decode."""


def _group(vectors: int) -> np.dtype:
    head = [("row", "<u8"), ("count", "<u4"), ("unused", "<u4")]
    return np.dtype([*head, ("pair", "<u4", vectors), ("token", "<u4", vectors)])


class Tiling(NamedTuple):
    """How kernels cut a layer.

    Attributes:
        group: an expert and the pairs (token, k) that go through it together: `Group` of
            `kernels/decode.cuh`, `Tile` of `kernels/tiles.cuh`.
        gate_up_rows: rows of each of gate and up that a block of threads computes.
        down_rows: rows of the down projection that it computes.
        threads: of a block.
    """

    group: np.dtype
    gate_up_rows: int
    down_rows: int
    threads: int

    @property
    def vectors(self) -> int:
        """Most pairs of a group."""
        return self.group["pair"].shape[0]


DECODE = Tiling(_group(8), GATE_UP_ROWS, DOWN_ROWS, THREADS)
PREFILL = Tiling(_group(16), 128, 256, 128)
GROUP = DECODE.group

TOLERANCE = 1e-6
"""Relative error that rounding may have, of an element against the largest of its vector."""

_PAGE = 1 << 28  # distance of the buffers of a case


class Case(msgspec.Struct, frozen=True):
    """One launch.

    Attributes:
        down: whether it is the down projection.
        layout: of the experts' rows.
        rows: uint8 [E, row_bytes].
        groups: [G] of the tiling's groups; `row` is the number of an expert here, not an address.
        vectors: uint8 [V, K] in fragment order.
        scales: uint8 [V, K / 32].
        limit: bound of gate and up, infinite for none.
        exact: whether every partial sum is a float32.
        expected: float64 [pairs, N], before quantisation; NaN where nothing may be written.
        tiling: of the kernels it is for.
    """

    down: bool
    layout: RowLayout
    rows: NDArray[np.uint8]
    groups: NDArray
    vectors: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    limit: float
    exact: bool
    expected: NDArray[np.float64]
    tiling: Tiling = DECODE

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of threads."""
        rows = self.tiling.down_rows if self.down else self.tiling.gate_up_rows
        return -(-self.expected.shape[1] // rows), len(self.groups), 1


def make_case(
    codec: str,
    hidden: int,
    intermediate: int,
    counts: Sequence[int],
    seed: int,
    *,
    down: bool,
    exact: bool,
    limit: float = np.inf,
    tiling: Tiling = DECODE,
) -> Case:
    """Draw experts and vectors.

    Args:
        codec: Of the experts.
        hidden: H.
        intermediate: I of this rank.
        counts: vectors of each group, 0 to 8 or 16; group i goes through expert i.
        seed: of the random numbers.
        down: which kernel it is for.
        exact: draw numbers of which every partial sum is a float32.
        limit: bound of gate and up.
        tiling: of the kernels it is for.
    """
    chance = np.random.default_rng(seed)
    layout = row_layout(codec, hidden, intermediate)
    rows = np.stack([_row(chance, layout, exact) for _ in counts])
    groups = np.zeros(len(counts), tiling.group)
    groups["row"], groups["count"] = np.arange(len(counts)), counts
    # What is behind the count must not be used: it points nowhere.
    groups["pair"] = groups["token"] = 1 << 30
    pairs, tokens = int(sum(counts)), max([*counts, 1])
    order = chance.permutation(pairs)
    start = 0
    for group, count in zip(groups, counts, strict=True):
        group["pair"][:count] = order[start : start + count]
        group["token"][:count] = chance.permutation(tokens)[:count]
        start += count
    k = intermediate if down else hidden
    vectors, scales = _vectors(chance, pairs if down else tokens, k, exact)
    expected = expected_of(layout, rows, groups, dequantise(vectors, scales), limit, down=down)
    stored = to_fragments(vectors)
    return Case(down, layout, rows, groups, stored, scales, limit, exact, expected, tiling)


def expected_of(
    layout: RowLayout,
    rows: NDArray[np.uint8],
    groups: NDArray,
    vectors: NDArray[np.float64],
    limit: float,
    *,
    down: bool,
) -> NDArray[np.float64]:
    """Return what is to come of vectors float64 [V, K]: `Case.expected` [pairs, N]."""
    wanted = layout.hidden if down else layout.intermediate
    expected = np.full((int(groups["count"].sum()), wanted), np.nan)
    for expert, group in enumerate(groups):
        w13, w2 = decode_row(layout, rows[expert])
        mine = group["pair"][: group["count"]]
        if down:
            expected[mine] = vectors[mine] @ w2.T
            continue
        gate, up = np.split(vectors[group["token"][: group["count"]]] @ w13.T, 2, axis=1)
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        with np.errstate(over="ignore"):
            expected[mine] = gate / (1 + np.exp(-gate)) * up
    return expected


def _row(chance: np.random.Generator, layout: RowLayout, exact: bool) -> NDArray[np.uint8]:
    row = np.zeros(layout.row_bytes, np.uint8)
    codec = get_codec(layout.codec)
    low, high = (126, 129) if exact else (118, 128)
    shapes = (2 * layout.intermediate, layout.hidden), (layout.hidden, layout.intermediate)
    sections = (layout.codes13, layout.scales13), (layout.codes2, layout.scales2)
    for (n, k), (codes_at, scales_at) in zip(shapes, sections, strict=True):
        if layout.codec == "w2":
            row[codes_at.slice] = pack_codes2(chance.integers(0, 4, (n, k), np.uint8))
        else:
            row[codes_at.slice] = pack_nibbles(chance.integers(0, 16, (n, k), np.uint8))
        group = codec.scale_group
        scales = chance.integers(low, high, (n, k // group)).astype(np.uint8)
        if layout.codec == "fp4-nv":  # E4M3: 0.5, 1 and 2, or most of what there is
            plain = [0x30, 0x38, 0x40]
            many = np.r_[0:0x50, 0xB0:0xB8]
            scales = chance.choice(np.array(plain if exact else many, np.uint8), scales.shape)
        row[scales_at.slice] = pack_scales(scales, group)
    if layout.tensor_scales.length:
        factors = [0.5, 2.0, 0.25, 0.0] if exact else [0.013, 0.021, 0.3, 0.0]
        row[layout.tensor_scales.slice] = np.array(factors, "<f4").view(np.uint8)
    return row


def _vectors(
    chance: np.random.Generator, count: int, k: int, exact: bool
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    if not exact:
        return quantise(chance.standard_normal((count, k)).astype(np.float32))
    # 0 and powers of two from 0.5 to 4
    plain = np.array([c for c in range(256) if c & 127 in (0, 0x30, 0x38, 0x40, 0x48)], np.uint8)
    scales = chance.integers(126, 129, (count, k // 32)).astype(np.uint8)
    return chance.choice(plain, (count, k)), scales


def run_case(program: Program, case: Case) -> dict[str, NDArray]:
    """Emulate a launch; see `result_of`. "written" says which bytes of the outputs were."""
    launch, buffers = launch_of(case)
    emulate(program, launch, buffers)
    out, out_scales = buffers[-2:]
    written = np.append(out.written, out_scales.written)
    return {**result_of(case, out.data, out_scales.data), "written": written}


def launch_of(case: Case) -> tuple[Launch, list[Buffer]]:
    """A launch and its memory: groups, vectors, their scales, rows, then both outputs."""
    pairs, n = case.expected.shape
    names = ("groups", "vectors", "scales", "rows", "out", "out_scales")
    addresses = {name: _PAGE * (i + 1) for i, name in enumerate(names)}
    arrays = (addressed_groups(case, addresses["rows"]), case.vectors, case.scales, case.rows)
    buffers = [Buffer.of(addresses[n], a) for n, a in zip(names[:4], arrays, strict=True)]
    out = Buffer.empty(addresses["out"], pairs * n * (4 if case.down else 1))
    out_scales = Buffer.empty(addresses["out_scales"], 0 if case.down else pairs * n // 32)
    launch = Launch(case.grid, case.tiling.threads, launch_parameters(case, addresses))
    return launch, [*buffers, out, out_scales]


def addressed_groups(case: Case, rows: int) -> NDArray:
    """The groups of a case whose rows lie at an address."""
    groups = case.groups.copy()
    groups["row"] = rows + groups["row"] * case.layout.row_bytes
    return groups


def launch_parameters(case: Case, addresses: Mapping[str, int]) -> bytes:
    """The kernel parameters of a case: what both kernels take, then what gate and up do."""
    k, n = _sizes(case)
    layout = case.layout
    sections = (layout.codes2, layout.scales2) if case.down else (layout.codes13, layout.scales13)
    pointers = [addresses[name] for name in ("groups", "vectors", "scales", "out")]
    shared = struct.pack("<4Q4I", *pointers, k, n, *(section.offset for section in sections))
    if not case.down:
        shift = steps_of(n).bit_length() - 1
        shared += struct.pack("<QfI", addresses["out_scales"], case.limit, shift)
    if layout.tensor_scales.length:
        shared += struct.pack("<I", layout.tensor_scales.offset)
    return shared


def result_of(
    case: Case, out: NDArray[np.uint8], out_scales: NDArray[np.uint8]
) -> dict[str, NDArray]:
    """Read the outputs' bytes.

    Returns:
        "parts" float32 [pairs, H] of the down projection; else "codes" uint8 [pairs, I] in column
        order and "scales" uint8 [pairs, I / 32].
    """
    pairs, n = case.expected.shape
    if case.down:
        return {"parts": out.view(np.float32).reshape(pairs, n)}
    return {
        "codes": from_fragments(out.reshape(pairs, n)),
        "scales": out_scales.reshape(pairs, n // 32),
    }


def _sizes(case: Case) -> tuple[int, int]:
    sizes = case.layout.hidden, case.layout.intermediate
    return sizes[::-1] if case.down else sizes


def mistake(case: Case, found: Mapping[str, NDArray]) -> str | None:
    """Say what is wrong with a result, as a sentence; None if it is right."""
    wanted = case.expected
    written = found.get("written")
    if written is not None and not written.all():
        return f"{int((~written).sum())} bytes of the output were not written."
    largest = np.abs(wanted).max(axis=1, keepdims=True, initial=0)
    slack = 0.0 if case.exact else TOLERANCE
    if case.down:
        right = np.abs(found["parts"] - wanted) <= slack * largest  # NaN is not
        return _first(~right, wanted, found["parts"], "element")
    # The activation rounds even where the sums are exact.
    blocks = np.abs(wanted).reshape(len(wanted), -1, 32).max(axis=2)
    least, most = (
        scale_bytes((blocks * (1 + s)).astype(np.float32)) for s in (-TOLERANCE, TOLERANCE)
    )
    scales = found["scales"]
    bad = (scales < least) | (scales > most)
    if bad.any():
        return _first(bad, least, scales, "scale")
    unit = np.repeat(e8m0_to_float64(scales), 32, axis=1)
    got = E4M3_VALUES[found["codes"]]
    reach = slack * np.repeat(blocks, 32, axis=1) + TOLERANCE * np.abs(wanted)
    low, high = (E4M3_VALUES[float64_to_e4m3((wanted + s * reach) / unit)] for s in (-1, 1))
    return _first((got < low) | (got > high) | np.isnan(got), wanted / unit, got, "element")


def _first(bad: NDArray, wanted: NDArray, got: NDArray, what: str) -> str | None:
    if not bad.any():
        return None
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    count = f"{int(bad.sum())} of {bad.size} differ"
    return f"{what} {list(at)} is {got[at]}, wanted {wanted[at]} ({count})."
