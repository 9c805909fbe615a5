"""Launches of the w2 kernels with bfloat16 vectors; the rest is as in `cases`.

The stated arithmetic, in float64 here: products of weights and bfloat16 numbers are exact, so are
their sums; gate and up are clamped, activated as silu(gate) * up, and rounded to bfloat16.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from moet_kernels.sass.emulate import Launch, emulate
from moet_kernels.sass.machine import Buffer
from moet_kernels.sass.source import Program
from moet_kernels.sm120.activations import dequantise, from_fragments
from moet_kernels.sm120.cases import (
    THREADS,
    TOLERANCE,
    Case,
    addressed_groups,
    expected_of,
    launch_parameters,
    make_case,
)

__all__ = [
    "from_bfloat16",
    "launch_of",
    "make_bf16_case",
    "mistake",
    "result_of",
    "run_case",
    "to_bfloat16",
]

_LEAST = 2.0**-100  # above exp(-87) times any gate and up that are drawn here
_PAGE = 1 << 28  # distance of the buffers of a case


def to_bfloat16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to the nearest bfloat16, ties to even; its bits. NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return (np.where(np.isnan(x), np.uint32(0x7FFF0000), rounded) >> np.uint32(16)).astype(
        np.uint16
    )


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def make_bf16_case(
    hidden: int,
    intermediate: int,
    counts: Sequence[int],
    seed: int,
    *,
    down: bool,
    exact: bool,
    limit: float = np.inf,
) -> Case:
    """Draw w2 experts and vectors; arguments as of `cases.make_case`.

    Returns:
        A case whose `vectors` are uint16 [V, K], bits of bfloat16 in column order, and whose
        `scales` are empty.
    """
    shape = "w2", hidden, intermediate, counts, seed
    like = make_case(*shape, down=down, exact=exact, limit=limit)
    if exact:  # these have few bits, so that every partial sum is a float32
        drawn = dequantise(from_fragments(like.vectors), like.scales).astype(np.float32)
    else:
        drawn = np.random.default_rng(seed).standard_normal(like.vectors.shape).astype(np.float32)
    vectors = to_bfloat16(drawn)
    real = from_bfloat16(vectors).astype(np.float64)
    expected = expected_of(like.layout, like.rows, like.groups, real, limit, down=down)
    empty = np.zeros((len(vectors), 0), np.uint8)
    return msgspec.structs.replace(like, vectors=vectors, scales=empty, expected=expected)


def run_case(program: Program, case: Case) -> dict[str, NDArray]:
    """Emulate a launch; see `result_of`. "written" says which bytes of the output were."""
    launch, buffers = launch_of(case)
    emulate(program, launch, buffers)
    return {**result_of(case, buffers[-1].data), "written": buffers[-1].written}


def launch_of(case: Case) -> tuple[Launch, list[Buffer]]:
    """A launch and its memory: groups, vectors, rows, then the output."""
    addresses = {name: _PAGE * (i + 1) for i, name in enumerate(("groups", "vectors", "rows"))}
    arrays = (addressed_groups(case, addresses["rows"]), case.vectors, case.rows)
    buffers = [Buffer.of(at, a) for at, a in zip(addresses.values(), arrays, strict=True)]
    addresses |= {"out": 4 * _PAGE, "scales": 0, "out_scales": 0}
    out = Buffer.empty(addresses["out"], case.expected.size * (4 if case.down else 2))
    return Launch(case.grid, THREADS, launch_parameters(case, addresses)), [*buffers, out]


def result_of(case: Case, out: NDArray[np.uint8]) -> dict[str, NDArray]:
    """Read the output's bytes: "parts" float32 [pairs, H] of down, else "activated" [pairs, I]."""
    if case.down:
        return {"parts": out.view(np.float32).reshape(case.expected.shape)}
    return {"activated": from_bfloat16(out.view(np.uint16)).reshape(case.expected.shape)}


def mistake(case: Case, found: Mapping[str, NDArray]) -> str | None:
    """Say what is wrong with a result, as a sentence; None if it is right.

    An activated value may be the neighbour of the right one where the exact value lies within the
    tolerance of the middle between two: the activation rounds even where the sums are exact, and
    a gate below -87 counts as -87 in the exponential.
    """
    wanted = case.expected
    written = found.get("written")
    if written is not None and not written.all():
        return f"{int((~written).sum())} bytes of the output were not written."
    largest = np.abs(wanted).max(axis=1, keepdims=True, initial=0)
    slack = (0.0 if case.exact else TOLERANCE) * largest
    (got,) = (found[name] for name in ("parts", "activated") if name in found)
    low, high = wanted - slack, wanted + slack
    if not case.down:
        slack = slack + TOLERANCE * np.abs(wanted) + _LEAST
        low, high = (
            from_bfloat16(to_bfloat16((wanted + sign * slack).astype(np.float32)))
            for sign in (-1, 1)
        )
    right = (got >= low) & (got <= high)
    if right.all():
        return None
    at = tuple(int(i) for i in np.argwhere(~right)[0])
    count = f"{int((~right).sum())} of {right.size} differ"
    return f"element {list(at)} is {got[at]}, wanted {wanted[at]} ({count})."
