"""Sources of torch tensors: the structs and checks of `moet_core.sources`, on any device.

`FloatSource` takes bfloat16, float16 or float32; FP8 weights may be uint8 or float8_e4m3fn, and
scales uint8, float8_e4m3fn or float8_e8m0fnu, as the format asks.
"""

from typing import Any

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
    "shard_source",
    "validate",
]


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
    return _weight(source).device


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


def validate(source: Source) -> None:
    """Twin of `moet_core.sources.validate` for a normalised source."""
    match source:
        case FloatSource():
            if not torch.isfinite(_extreme(source.weight)):
                bad = ~torch.isfinite(source.weight)
                refuse(source.name, "weight", source.weight, bad.to(torch.uint8))
        case Mxfp4Source():
            _refuse(source.name, "scale", source.scale, source.scale == 0xFF)
        case Fp8Source():
            _refuse(source.name, "weight", source.weight, (source.weight & 0x7F) == 0x7F)
            _refuse(source.name, "scale", source.scale, ~torch.isfinite(source.scale))
        case Nvfp4Source():
            _refuse(source.name, "scale", source.scale, (source.scale & 0x7F) == 0x7F)


def _extreme(weight: Tensor) -> Tensor:
    """Return a number that is finite exactly if all weights are."""
    low, high = torch.aminmax(weight)
    return low.double() - high.double()


def _refuse(name: str, part: str, values: Tensor, bad: Tensor) -> None:
    refuse(name, part, values, bad.to(torch.uint8))


def _weight(source: Any) -> Tensor:
    return source.nibbles if hasattr(source, "nibbles") else source.weight
