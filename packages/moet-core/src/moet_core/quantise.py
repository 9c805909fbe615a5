"""From a checkpoint's numbers to canonical codes: the rules, in numpy, exact in float64.

These functions are the golden reference; every other implementation must equal them bit for bit.
They say which code each weight gets; `moet_core.layout` says where it is stored.

Decisions about a whole tensor (where zeros go, fp4-nv's tensor scale) must not depend on how it is
sharded. A function that takes `whole` makes them on that source instead of its shard.
"""

import numpy as np
from numpy.typing import NDArray

from moet_core.errors import ConfigError, TensorError
from moet_core.floats import (
    E4M3_MAX,
    E4M3_VALUES,
    float64_to_e4m3,
    split_nibbles,
)
from moet_core.sources import (
    Mxfp4Source,
    Nvfp4Source,
    Source,
    tensor_scale_of,
    to_float64,
    validate,
)

__all__ = [
    "BIG_INDEX",
    "CODE_OF_NIBBLE",
    "E2M1_THRESHOLDS",
    "ROUND_UP_MANTISSA",
    "W2_LEVELS",
    "ZERO_MODES",
    "block_exponents",
    "check_has_fp4_nv",
    "check_zeros_mode",
    "fp4_mx_nibbles",
    "fp4_nv_nibbles",
    "fp4_nv_tensor_scale",
    "majority_alternates",
    "tensor_scale_from_amax",
    "w2_codes",
    "zeros_alternate",
]

Bytes = NDArray[np.uint8]

W2_LEVELS = np.array([-4.0, -1.0, 1.0, 4.0])
"""Value of each 2-bit code; there is no zero level."""

E2M1_THRESHOLDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
"""Midpoints between E2M1 magnitudes; a value on a midpoint takes the lower magnitude."""

BIG_INDEX = 5
"""First magnitude index of the big class: magnitudes up to 2 become 1, from 3 they become 4."""

CODE_OF_NIBBLE = np.array([2] * 5 + [3] * 3 + [1] * 5 + [0] * 3, dtype=np.uint8)
"""2-bit code of each e2m1 nibble; the sign is kept, that of zeros too."""

ROUND_UP_MANTISSA = 0.5303300858899107
"""Smallest float64 above 6 / 2**3.5 = sqrt(9/32); see `block_exponents`."""

ZERO_MODES = ("auto", "sign", "alternate")


def check_zeros_mode(zeros: str) -> None:
    """Raise ConfigError for an unknown way to place zeros."""
    if zeros not in ZERO_MODES:
        allowed = ", ".join(ZERO_MODES)
        raise ConfigError(f"Zeros mode {zeros!r} does not exist; choose one of: {allowed}.")


def block_exponents(amax: NDArray[np.float64]) -> NDArray[np.int32]:
    """Return round(log2(amax / 6)) clamped to -127..127, and -127 for zero, without a logarithm.

    With amax = m * 2**e and m in [1/2, 1), log2(amax / 6) lies in e - 3.585 .. e - 2.585. It
    rounds to e - 3 from e - 3.5 on, which is m >= 6 / 2**3.5, and to e - 4 below. That bound is
    irrational, so no float64 equals it and there are no ties; comparing with the smallest float64
    above it decides every m rightly.
    """
    mantissa, exponent = np.frexp(amax)
    rounded = np.clip(exponent - 3 - (mantissa < ROUND_UP_MANTISSA), -127, 127)
    return np.where(amax > 0, rounded, -127).astype(np.int32)


def w2_codes(
    source: Source, *, zeros: str = "auto", whole: Source | None = None
) -> tuple[Bytes, Bytes]:
    """Return 2-bit codes uint8 [N, K] (0..3) and E8M0 scales uint8 [N, K/32].

    From MXFP4 the scales are copied and codes are looked up from nibbles, zeros by their sign bit
    whatever `zeros` says. Every other format goes through the requantisation grid, where exact
    zeros of the source take a sign by `zeros`: "sign" their sign bit, "alternate" negative in odd
    columns, "auto" as `zeros_alternate(whole or source)` says.

    Raises:
        TensorError: The source is malformed or not finite.
        ConfigError: `zeros` is no known mode.
    """
    check_zeros_mode(zeros)
    validate(source)
    if isinstance(source, Mxfp4Source):
        return CODE_OF_NIBBLE[split_nibbles(source.nibbles)], source.scale.copy()
    values = to_float64(source)
    nibbles, scales = _grid_nibbles(values)
    codes = CODE_OF_NIBBLE[nibbles]
    if zeros == "alternate" or (zeros == "auto" and zeros_alternate(whole or source)):
        by_column = np.where(np.arange(values.shape[1]) % 2, 1, 2).astype(np.uint8)
        codes = np.where(values == 0, by_column, codes)
    return codes, scales


def fp4_mx_nibbles(source: Source) -> tuple[Bytes, Bytes]:
    """Return e2m1 nibbles uint8 [N, K] (0..15) and E8M0 scales uint8 [N, K/32].

    MXFP4 is copied; every other format goes through the same grid as `w2_codes`, so that w2 codes
    are a function of these nibbles and the scales are equal.

    Raises:
        TensorError: The source is malformed or not finite.
    """
    validate(source)
    if isinstance(source, Mxfp4Source):
        return split_nibbles(source.nibbles), source.scale.copy()
    return _grid_nibbles(to_float64(source))


def fp4_nv_nibbles(source: Source, *, whole: Source | None = None) -> tuple[Bytes, Bytes, float]:
    """Return e2m1 nibbles uint8 [N, K], e4m3 scale bits uint8 [N, K/16] and the tensor scale.

    NVFP4 is copied. Float and FP8 sources are quantised on two levels: tensor scale (taken from
    `whole or source`), block scale = E4M3(amax / 6 / tensor scale), nibble = nearest e2m1, ties to
    the lower magnitude. Midpoints times both scales have at most 31 significant bits, so that the
    comparisons in float64 are exact. Under a zero block scale only the sign is kept.

    Raises:
        TensorError: The source is malformed, not finite, or MXFP4.
    """
    validate(source)
    check_has_fp4_nv(source)
    if isinstance(source, Nvfp4Source):
        return split_nibbles(source.nibbles), source.scale.copy(), tensor_scale_of(source)
    tensor_scale = fp4_nv_tensor_scale(whole or source)
    values = to_float64(source)
    blocks = values.reshape(len(values), -1, 16)
    scales = float64_to_e4m3(np.abs(blocks).max(axis=2) / 6 / tensor_scale)
    step = E4M3_VALUES[scales][..., None] * tensor_scale
    nibbles = _nearest_nibbles(blocks, step).reshape(values.shape)
    return nibbles, scales, tensor_scale


def check_has_fp4_nv(source: Source) -> None:
    """Raise TensorError for MXFP4, whose E8M0 scales do not fit E4M3."""
    if isinstance(source, Mxfp4Source):
        raise TensorError(
            source.name,
            wanted="a float, FP8 or NVFP4 tensor",
            got="MXFP4",
            advice="Codec fp4-nv is not defined for MXFP4; use fp4-mx.",
        )


def fp4_nv_tensor_scale(source: Source) -> float:
    """Return the float32 tensor scale that maps the largest magnitude to 6 * 448."""
    validate(source)
    return tensor_scale_from_amax(float(np.abs(to_float64(source)).max()), source.name)


def tensor_scale_from_amax(amax: float, name: str) -> float:
    """Return amax / 2688 rounded to float32, 1.0 for zero and never less than 2**-149."""
    if amax == 0:
        return 1.0
    with np.errstate(over="ignore", under="ignore"):
        scale = float(np.float64(amax / (6 * E4M3_MAX)).astype(np.float32))
    if scale == np.inf:
        raise TensorError(name, wanted="a tensor scale that fits float32", got=f"maximum {amax!r}")
    return max(scale, 2.0**-149)


def zeros_alternate(source: Source) -> bool:
    """Say whether "auto" alternates the zeros of this (whole) tensor.

    It does when the tensor has zeros and at least 95 % of them share a sign: 2-bit codes have no
    zero level, and one-signed zeros would bias every row. MXFP4 zeros always keep their sign.
    """
    if isinstance(source, Mxfp4Source):
        return False
    values = to_float64(source)
    zero = values == 0
    return majority_alternates(int(zero.sum()), int((zero & np.signbit(values)).sum()))


def majority_alternates(zeros: int, negative: int) -> bool:
    """Say whether `negative` of `zeros` zeros being negative is one-signed (>= 95 %)."""
    return zeros > 0 and max(negative, zeros - negative) * 100 >= zeros * 95


def _grid_nibbles(values: NDArray[np.float64]) -> tuple[Bytes, Bytes]:
    blocks = values.reshape(len(values), -1, 32)
    exponents = block_exponents(np.abs(blocks).max(axis=2))
    nibbles = _nearest_nibbles(blocks, np.ldexp(1.0, exponents)[..., None])
    return nibbles.reshape(values.shape), (exponents + 127).astype(np.uint8)


def _nearest_nibbles(values: NDArray[np.float64], step: NDArray[np.float64]) -> Bytes:
    """Return the nibble nearest to values / step; `step` broadcasts, and 0 keeps only the sign."""
    magnitude = np.abs(values)
    index = np.zeros(values.shape, dtype=np.uint8)
    for threshold in E2M1_THRESHOLDS:
        index += magnitude > threshold * step
    index[np.broadcast_to(step == 0, index.shape)] = 0
    return np.bitwise_or(index, np.signbit(values).astype(np.uint8) << 3)
