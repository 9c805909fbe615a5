"""Codecs: a float matrix to planes of bytes and back, by name.

    w2       2-bit sign-symmetric codes, E8M0 scale per 32: 2.25 bits a weight
    fp4-mx   e2m1 nibbles, E8M0 scale per 32: 4.25 bits; exact for MXFP4 checkpoints
    fp4-nv   e2m1 nibbles, e4m3 scale per 16, one tensor scale: 4.5 bits; exact for NVFP4

A codec is "canonical codes" (`moet_core.quantise`) followed by "pack" (`moet_core.layout`).
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from moet_core import layout
from moet_core.errors import ConfigError, TensorError
from moet_core.floats import E2M1_VALUES, E4M3_VALUES, e8m0_to_float64
from moet_core.quantise import (
    W2_LEVELS,
    check_zeros_mode,
    fp4_mx_nibbles,
    fp4_nv_nibbles,
    w2_codes,
    zeros_alternate,
)
from moet_core.sources import Source

__all__ = [
    "Codec",
    "Planes",
    "check_bf16_range",
    "codec_names",
    "fp4_mx_nibbles",
    "fp4_nv_nibbles",
    "get_codec",
    "register_codec",
    "w2_codes",
    "zeros_alternate",
]

Bytes = NDArray[np.uint8]


class Planes(Struct, frozen=True, eq=False):
    """One encoded matrix: `codes` and `scales` are uint8 1-D in the codec's layout.

    `tensor_scale` is a float32 number for codecs that have one, else None.
    """

    codec: str
    shape: tuple[int, int]
    codes: Bytes
    scales: Bytes
    tensor_scale: float | None = None


class Encode(Protocol):
    """Encode a source; decisions about the whole tensor are made on `whole or source`."""

    def __call__(
        self, source: Source, *, zeros: str = "auto", whole: Source | None = None
    ) -> Planes: ...


class Codec(Struct, frozen=True, kw_only=True):
    """How matrices are stored.

    Attributes:
        name: The name users write.
        layout: Id of the byte order; it changes whenever a byte would.
        code_bits: Bits of one weight in the code plane.
        scale_group: Weights along k that share one scale byte.
        has_tensor_scale: Whether a matrix also has one float32 scale.
        encode: `encode(source, *, zeros="auto", whole=None) -> Planes`; raises TensorError for a
            source it cannot represent and ConfigError for an unknown `zeros` mode.
        decode: `decode(planes) -> float64 [N, K]`, exact.
    """

    name: str
    layout: str
    code_bits: int
    scale_group: int
    has_tensor_scale: bool
    encode: Encode
    decode: Callable[[Planes], NDArray[np.float64]]

    def code_bytes(self, n: int, k: int) -> int:
        """Return the length of the code plane of a matrix [n, k]."""
        return n * k * self.code_bits // 8

    def scale_bytes(self, n: int, k: int) -> int:
        """Return the length of the scale plane of a matrix [n, k]."""
        return n * k // self.scale_group

    def bits_per_weight(self, n: int, k: int) -> float:
        """Return the bits a weight of a matrix [n, k] costs, scales included."""
        tensor_scale = 32 / (n * k) if self.has_tensor_scale else 0
        return self.code_bits + 8 / self.scale_group + tensor_scale


def get_codec(name: str) -> Codec:
    """Return the codec of that name, or raise ConfigError listing the allowed names."""
    if name not in _CODECS:
        allowed = ", ".join(codec_names())
        raise ConfigError(f"Codec {name!r} does not exist; choose one of: {allowed}.")
    return _CODECS[name]


def register_codec(codec: Codec) -> None:
    """Make a codec known by its name; ConfigError if the name is taken."""
    if codec.name in _CODECS:
        raise ConfigError(f"Codec {codec.name!r} is already registered; choose another name.")
    _CODECS[codec.name] = codec


def codec_names() -> tuple[str, ...]:
    """Return the names of all codecs, in the order they were registered."""
    return tuple(_CODECS)


def check_bf16_range(scales: Bytes, name: str) -> None:
    """Raise TensorError if a w2 or fp4-mx scale would overflow bfloat16 kernels.

    Bytes up to 252 are allowed: the largest level times 2**(253 - 127) is no finite bfloat16.
    """
    largest = int(scales.max(initial=0))
    if largest > 252:
        raise TensorError(
            name,
            wanted="E8M0 scale bytes up to 252, whose products are finite in bfloat16",
            got=f"byte {largest}",
            advice="Weights this large cannot be served.",
        )


def _encode_w2(source: Source, *, zeros: str = "auto", whole: Source | None = None) -> Planes:
    codes, scales = w2_codes(source, zeros=zeros, whole=whole)
    return Planes("w2", source.shape, layout.pack_codes2(codes), layout.pack_scales(scales, 32))


def _decode_w2(planes: Planes) -> NDArray[np.float64]:
    codes = layout.unpack_codes2(planes.codes, *planes.shape)
    scales = layout.unpack_scales(planes.scales, *planes.shape, 32)
    return W2_LEVELS[codes] * e8m0_to_float64(scales).repeat(32, axis=1)


# FP4 keeps the sign of zeros in the nibble: `zeros` has nothing to place, only to be a known mode.
def _encode_fp4_mx(source: Source, *, zeros: str = "auto", whole: Source | None = None) -> Planes:
    check_zeros_mode(zeros)
    nibbles, scales = fp4_mx_nibbles(source)
    packed = layout.pack_nibbles(nibbles)
    return Planes("fp4-mx", source.shape, packed, layout.pack_scales(scales, 32))


def _decode_fp4_mx(planes: Planes) -> NDArray[np.float64]:
    nibbles = layout.unpack_nibbles(planes.codes, *planes.shape)
    scales = layout.unpack_scales(planes.scales, *planes.shape, 32)
    return E2M1_VALUES[nibbles] * e8m0_to_float64(scales).repeat(32, axis=1)


def _encode_fp4_nv(source: Source, *, zeros: str = "auto", whole: Source | None = None) -> Planes:
    check_zeros_mode(zeros)
    nibbles, scales, tensor_scale = fp4_nv_nibbles(source, whole=whole)
    packed = layout.pack_nibbles(nibbles)
    return Planes("fp4-nv", source.shape, packed, layout.pack_scales(scales, 16), tensor_scale)


def _decode_fp4_nv(planes: Planes) -> NDArray[np.float64]:
    assert planes.tensor_scale is not None
    nibbles = layout.unpack_nibbles(planes.codes, *planes.shape)
    scales = layout.unpack_scales(planes.scales, *planes.shape, 16)
    scale = E4M3_VALUES[scales].repeat(16, axis=1) * planes.tensor_scale
    return E2M1_VALUES[nibbles] * scale


_CODECS: dict[str, Codec] = {}

register_codec(
    Codec(
        name="w2",
        layout=layout.W2_LAYOUT,
        code_bits=2,
        scale_group=32,
        has_tensor_scale=False,
        encode=_encode_w2,
        decode=_decode_w2,
    )
)
register_codec(
    Codec(
        name="fp4-mx",
        layout=layout.FP4_LAYOUT,
        code_bits=4,
        scale_group=32,
        has_tensor_scale=False,
        encode=_encode_fp4_mx,
        decode=_decode_fp4_mx,
    )
)
register_codec(
    Codec(
        name="fp4-nv",
        layout=layout.FP4_LAYOUT,
        code_bits=4,
        scale_group=16,
        has_tensor_scale=True,
        encode=_encode_fp4_nv,
        decode=_decode_fp4_nv,
    )
)
