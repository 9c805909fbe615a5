"""Sources of torch tensors: the structs and checks of `moet_core.sources`, on any device.

`FloatSource` takes bfloat16, float16 or float32; FP8 weights may be uint8 or float8_e4m3fn, and
scales uint8, float8_e4m3fn or float8_e8m0fnu, as the format asks.
"""

from collections.abc import Iterator

import torch
from msgspec import structs
from torch import Tensor

from moet_core.errors import TensorError
from moet_core.shards import shard_source
from moet_core.sources import (
    FloatSource,
    Fp8Source,
    Mxfp4Source,
    Nvfp4Source,
    Source,
    check_structure,
    refuse,
)

__all__ = [
    "FloatSource",
    "Fp8Source",
    "Mxfp4Source",
    "Nvfp4Source",
    "Source",
    "device_of",
    "from_numpy",
    "normalised",
    "row_ranges",
    "shard_source",
    "validate",
]


_CHUNK_ON_CPU = 2**18
"""Bytes of weights at a time for which all temporaries stay in a core's second-level cache."""

_CHUNK_ELSEWHERE = 2**22
"""Bytes of weights at a time that fill a GPU while temporaries stay small."""


def from_numpy(source: Source) -> Source:
    """Return the same source with its numpy arrays as torch tensors that share their memory."""
    arrays = {
        name: torch.from_numpy(value)
        for name, value in structs.asdict(source).items()
        if hasattr(value, "__array_interface__") and value.ndim
    }
    return structs.replace(source, **arrays)


def device_of(source: Source) -> torch.device:
    """Return the device a source's tensors are on."""
    match source:
        case FloatSource() | Fp8Source():
            return source.weight.device
        case Mxfp4Source() | Nvfp4Source():
            return source.nibbles.device


def normalised(source: Source) -> Source:
    """Check a source's structure and view 8-bit floats as uint8, bfloat16 bits as bfloat16.

    Raises:
        TensorError: Dtypes and shapes do not fit together, see `moet_core.sources`.
    """
    check_structure(source)
    match source:
        case FloatSource():
            if source.weight.dtype == torch.float64:
                wanted = "a weight of type bfloat16, float16 or float32"
                raise TensorError(source.name, wanted=wanted, got="float64")
            if source.bf16:
                weight = source.weight.view(torch.bfloat16)
                return structs.replace(source, weight=weight, bf16=False)
            return source
        case Fp8Source():
            return structs.replace(source, weight=source.weight.view(torch.uint8))
        case Mxfp4Source() | Nvfp4Source():
            return structs.replace(source, scale=source.scale.view(torch.uint8))


def row_ranges(source: Source) -> Iterator[tuple[int, int]]:
    """Cut the rows of a source into ranges, multiples of 16, to be worked on one at a time."""
    weights = source.nibbles if isinstance(source, Mxfp4Source | Nvfp4Source) else source.weight
    n, row_bytes = len(weights), weights.shape[1] * weights.element_size()
    chunk = _CHUNK_ON_CPU if weights.device.type == "cpu" else _CHUNK_ELSEWHERE
    rows = max(16, chunk // row_bytes // 16 * 16)
    for start in range(0, n, rows):
        yield start, min(start + rows, n)


def validate(source: Source) -> None:
    """Twin of `moet_core.sources.validate` for a normalised source."""
    match source:
        case FloatSource():
            low, high = torch.aminmax(source.weight)
            if not torch.isfinite(low.double() - high.double()):
                _refuse(source.name, "weight", source.weight, ~torch.isfinite(source.weight))
        case Mxfp4Source():
            if source.scale.max() == 0xFF:
                _refuse(source.name, "scale", source.scale, source.scale == 0xFF)
        case Fp8Source():
            _refuse_e4m3_nan(source.name, "weight", source.weight, source)
            _refuse(source.name, "scale", source.scale, ~torch.isfinite(source.scale))
        case Nvfp4Source():
            _refuse_e4m3_nan(source.name, "scale", source.scale, source)


def _refuse_e4m3_nan(name: str, part: str, values: Tensor, source: Source) -> None:
    # A maximum in pieces is much faster than a comparison of all bytes, which only errors need.
    if any((values[start:stop] & 0x7F).max() == 0x7F for start, stop in row_ranges(source)):
        _refuse(name, part, values, (values & 0x7F) == 0x7F)


def _refuse(name: str, part: str, values: Tensor, bad: Tensor) -> None:
    refuse(name, part, values, bad.to(torch.uint8))  # torch has no argmax of bool
