"""Launches of our kernels on random data, with what they should give."""

import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from moet_core.layout import pack_codes2, pack_scales
from moet_kernels.sass.emulate import Launch, emulate
from moet_kernels.sass.machine import Buffer
from moet_kernels.sass.matrix_ops import E4M3
from moet_kernels.sass.source import Program, parse_source

__all__ = ["Case", "copy_case", "kernel_source", "run_case", "w2_case"]

_LEVELS = np.array([-4.0, -1.0, 1.0, 4.0])
_PAGE = 1 << 28  # distance of the buffers of a case


class Case(msgspec.Struct, frozen=True):
    """One launch.

    Attributes:
        grid: blocks.
        threads: threads a block.
        inputs: arrays, in the order of the pointer parameters behind the output.
        output_bytes: size of the output, the first pointer parameter.
        numbers: the 32-bit parameters behind the pointers.
        expected: what exact arithmetic gives: float64, or bytes for a copy.
    """

    grid: tuple[int, int, int]
    threads: int
    inputs: tuple[NDArray, ...]
    output_bytes: int
    numbers: tuple[int, ...]
    expected: NDArray

    def parameters(self, addresses: Sequence[int]) -> bytes:
        """The kernel parameters: output and input addresses, then the numbers."""
        return struct.pack(f"<{len(addresses)}Q{len(self.numbers)}I", *addresses, *self.numbers)


def kernel_source(name: str) -> Program:
    """Read one of our kernels."""
    return parse_source((Path(__file__).parent / "kernels" / f"{name}.sass").read_text())


def copy_case(vectors: int, blocks: int, seed: int) -> Case:
    """Copy random 16-byte vectors."""
    data = np.random.default_rng(seed).integers(0, 256, 16 * vectors, np.uint8)
    return Case((blocks, 1, 1), 256, (data,), data.size, (vectors,), data)


def w2_case(kernel: str, m: int, n: int, k: int, seed: int, *, exact: bool) -> Case:
    """Multiply random activations [m, k] with random 2-bit weights [n, k].

    Args:
        kernel: w2_gemm_bf16 or w2_gemm_e4m3.
        m: tokens.
        n: rows of the weights.
        k: columns of both.
        seed: of the random numbers.
        exact: draw numbers of which every partial sum is a float32.
    """
    chance = np.random.default_rng(seed)
    codes = chance.integers(0, 4, (n, k), np.uint8)
    low, high = (126, 129) if exact else (110, 140)
    scales = chance.integers(low, high, (n, k // 32)).astype(np.uint8)
    weights = _LEVELS[codes] * np.repeat(np.exp2(scales - 127.0), 32, axis=1)
    planes = (pack_codes2(codes), pack_scales(scales, 32))
    if kernel == "w2_gemm_bf16":
        values = chance.integers(-8, 9, (m, k)) if exact else chance.standard_normal((m, k))
        x = _bf16(values.astype(np.float32))
        real = (x.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        inputs: tuple[NDArray, ...] = (x, *planes)
    else:
        # Without NaN; the exact ones are 0 and powers of two from 0.5 to 4.
        whole = [c for c in range(256) if c & 127 != 127]
        plain = [c for c in whole if c & 127 in (0, 0x30, 0x38, 0x40, 0x48)]
        x = chance.choice(np.array(plain if exact else whole, np.uint8), (m, k))
        x_scales = chance.integers(low, high, (m, k // 32)).astype(np.uint8)
        real = E4M3[x] * np.repeat(np.exp2(x_scales - 127.0), 32, axis=1)
        inputs = (x, x_scales, *planes)
    return Case((n // 16, -(-m // 8), 1), 128, inputs, 4 * m * n, (m, n, k), real @ weights.T)


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    odd = bits >> np.uint32(16) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def run_case(program: Program, case: Case) -> NDArray[np.uint8]:
    """Emulate a launch and return the bytes of the output; all of them must be written."""
    addresses = [_PAGE * (i + 1) for i in range(len(case.inputs) + 1)]
    buffers = [Buffer.empty(addresses[0], case.output_bytes)]
    buffers += [Buffer.of(a, x) for a, x in zip(addresses[1:], case.inputs, strict=True)]
    emulate(program, Launch(case.grid, case.threads, case.parameters(addresses)), buffers)
    if not buffers[0].written.all():
        raise AssertionError(f"{int((~buffers[0].written).sum())} output bytes were not written")
    return buffers[0].data
