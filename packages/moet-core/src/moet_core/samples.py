"""Synthetic checkpoint tensors for tests and benchmarks, deterministic by seed.

`typical_source` looks like trained weights. `difficult_source` is made of whatever decides
between two answers: midpoints, zeros of either sign, subnormals, the largest and smallest scales.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moet_core.errors import ConfigError
from moet_core.floats import (
    E4M3_MAX,
    bf16_to_float32,
    float32_to_bf16,
    float64_to_e4m3,
    join_nibbles,
)
from moet_core.quantise import E2M1_THRESHOLDS, fp4_mx_nibbles, fp4_nv_nibbles
from moet_core.sources import FloatSource, Fp8Source, Mxfp4Source, Nvfp4Source, Source

__all__ = ["BLOCK_KINDS", "FORMATS", "difficult_source", "typical_source"]

FORMATS = ("bf16", "fp16", "fp32", "fp8", "mxfp4", "nvfp4")

BLOCK_KINDS = ("normal", "ties", "zeros", "negative zeros", "subnormal", "huge", "tiny", "mixed")
"""What the blocks of a difficult tensor are filled with."""

Rng = np.random.Generator


def typical_source(source_format: str, n: int, k: int, *, seed: int = 0) -> Source:
    """Return a matrix [n, k] of normal weights (deviation 0.02) as a checkpoint stores it.

    Args:
        source_format: One of `FORMATS`.
        n: Rows, a multiple of 16.
        k: Columns, a multiple of 32.
        seed: Same seed, same bytes.
    """
    name = f"typical.{source_format}"
    weight = np.random.default_rng(seed).normal(0, 0.02, (n, k)).astype(np.float32)
    plain = FloatSource(name, weight)
    match source_format:
        case "bf16":
            return FloatSource(name, float32_to_bf16(weight), bf16=True)
        case "fp16":
            return FloatSource(name, weight.astype(np.float16))
        case "fp32":
            return plain
        case "fp8":
            scale = np.full((-(-n // 128), -(-k // 128)), np.abs(weight).max() / E4M3_MAX)
            bytes_ = float64_to_e4m3(weight / scale.flat[0])
            return Fp8Source(name, bytes_, scale.astype(np.float32))
        case "mxfp4":
            nibbles, scales = fp4_mx_nibbles(plain)
            return Mxfp4Source(name, join_nibbles(nibbles), scales)
        case "nvfp4":
            nibbles, scales, scale_2 = fp4_nv_nibbles(plain)
            return Nvfp4Source(name, join_nibbles(nibbles), scales, scale_2)
    raise _unknown(source_format)


def difficult_source(
    source_format: str,
    n: int,
    k: int,
    *,
    seed: int = 0,
    kinds: Sequence[str] = BLOCK_KINDS,
) -> Source:
    """Return a matrix [n, k] on which implementations are likely to differ.

    Args:
        source_format: One of `FORMATS`; FP8 comes with a block size drawn by the seed.
        n: Rows, a multiple of 16.
        k: Columns, a multiple of 32.
        seed: Same arguments, same bytes.
        kinds: Some of `BLOCK_KINDS`; each 32 columns of a row are filled as one of them.
    """
    rng, name = np.random.default_rng(seed), f"difficult.{source_format}"
    kind = rng.choice(np.array(kinds), (n, k // 32, 1))
    match source_format:
        case "bf16":
            bits = float32_to_bf16(_floats(rng, kind, -133, 127).astype(np.float32))
            return FloatSource(name, np.where(_finite_bf16(bits), bits, 0x7F7F), bf16=True)
        case "fp16":
            halves = np.clip(_floats(rng, kind, -24, 15), -65504, 65504)
            return FloatSource(name, halves.astype(np.float16))
        case "fp32":
            return FloatSource(name, _floats(rng, kind, -149, 127).astype(np.float32))
        case "fp8":
            return _difficult_fp8(rng, kind, name)
        case "mxfp4":
            nibbles = join_nibbles(_codes(rng, kind, 16))
            return Mxfp4Source(name, nibbles, _bytes(rng, (n, k // 32), 255))
        case "nvfp4":
            return _difficult_nvfp4(rng, kind, name)
    raise _unknown(source_format)


def _floats(rng: Rng, kind: NDArray[np.str_], lowest: int, highest: int) -> NDArray[np.float64]:
    """Return blocks of float64 whose powers of two lie in lowest..highest."""
    shape = (*kind.shape[:2], 32)
    sign = rng.choice([-1.0, 1.0], shape)
    size = rng.integers(-8, 8, kind.shape).clip(lowest + 4, highest - 4)
    normal = rng.normal(0, 1, shape) * np.ldexp(1.0, size)
    ties = np.append(E2M1_THRESHOLDS, 6.0)[rng.integers(0, 8, shape)] * np.ldexp(1.0, size)
    ties[..., 0] = 6 * np.ldexp(1.0, size[..., 0])
    mixed = np.where(rng.random(shape) < 0.3, 0.0, ties)
    filled = np.select(
        [kind == "normal", kind == "ties", kind == "subnormal", kind == "huge", kind == "tiny"],
        [
            normal,
            ties,
            np.ldexp(rng.integers(0, 16, shape).astype(np.float64), lowest),
            np.ldexp(rng.uniform(1, 1.99, shape), highest),
            np.ldexp(rng.uniform(1, 2, shape), lowest + 12),
        ],
        default=mixed,
    )
    filled = np.where((kind == "zeros") | (kind == "negative zeros"), 0.0, filled)
    sign = np.where(kind == "zeros", 1.0, np.where(kind == "negative zeros", -1.0, sign))
    return (sign * np.abs(filled)).reshape(shape[0], -1)


def _codes(rng: Rng, kind: NDArray[np.str_], count: int) -> NDArray[np.uint8]:
    """Return blocks of sign-magnitude codes 0..count-1, `count` a power of two."""
    shape = (*kind.shape[:2], 32)
    sign = count // 2
    codes = rng.integers(0, count, shape)
    small = rng.integers(0, 2, shape) + sign * rng.integers(0, 2, shape)
    codes = np.where((kind == "subnormal") | (kind == "tiny"), small, codes)
    codes = np.where(kind == "huge", codes | sign - 2, codes)
    codes = np.where(kind == "zeros", 0, codes)
    codes = np.where(kind == "negative zeros", sign, codes)
    codes = np.where((kind == "mixed") & (rng.random(shape) < 0.5), codes & sign, codes)
    return codes.reshape(shape[0], -1).astype(np.uint8)


def _bytes(rng: Rng, shape: tuple[int, int], stop: int) -> NDArray[np.uint8]:
    """Return bytes below `stop`, most of them near one place so that blocks resemble each other."""
    middle = int(rng.integers(0, stop))
    near = (middle + rng.integers(-3, 4, shape)).clip(0, stop - 1)
    return np.where(rng.random(shape) < 0.2, rng.integers(0, stop, shape), near).astype(np.uint8)


def _difficult_fp8(rng: Rng, kind: NDArray[np.str_], name: str) -> Fp8Source[NDArray[np.generic]]:
    weight = _codes(rng, kind, 256)
    weight[(weight & 0x7F) == 0x7F] -= 1
    n, k = weight.shape
    block = [(128, 128), (16, 32), (1, 1), (7, 24), (n, k), (5, 40)][rng.integers(0, 6)]
    shape = (-(-n // block[0]), -(-k // block[1]))
    scale = rng.choice([1.0, 0.75, rng.uniform(1, 2)], shape) * 2.0 ** rng.integers(-120, 118)
    scale *= rng.choice([1.0, 1.0, 1.0, -1.0, 0.0], shape)
    return Fp8Source(name, weight, scale.astype(np.float32), block)


def _difficult_nvfp4(
    rng: Rng, kind: NDArray[np.str_], name: str
) -> Nvfp4Source[NDArray[np.generic]]:
    nibbles = _codes(rng, kind, 16)
    scale = _bytes(rng, (nibbles.shape[0], nibbles.shape[1] // 16), 127)
    scale[rng.random(scale.shape) < rng.choice([0.0, 0.1])] |= 0x80
    sizes = [0.0, 2.0**-149, 1e-38, 2.0**-10, rng.uniform(1e-5, 1e-3), -0.5, 1.0, 1e35]
    scale_2 = float(np.float32(sizes[rng.integers(0, len(sizes))]))
    return Nvfp4Source(name, join_nibbles(nibbles), scale, scale_2)


def _finite_bf16(bits: NDArray[np.uint16]) -> NDArray[np.bool_]:
    return np.isfinite(bf16_to_float32(bits))


def _unknown(source_format: str) -> ConfigError:
    allowed = ", ".join(FORMATS)
    return ConfigError(f"Source format {source_format!r} does not exist; choose one of: {allowed}.")
