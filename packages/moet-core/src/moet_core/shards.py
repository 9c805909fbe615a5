"""Tensor parallelism: one rank's part of a checkpoint tensor, in the checkpoint's own format.

Works on sources of numpy and of torch arrays alike; parts are views wherever that is possible.
"""

from typing import Any, Literal

import numpy as np
from msgspec import structs

from moet_core.errors import ConfigError, TensorError
from moet_core.sources import (
    FloatSource,
    Fp8Source,
    Mxfp4Source,
    Nvfp4Source,
    Source,
    check_structure,
)

__all__ = ["Projection", "shard_source"]

Projection = Literal["gate", "up", "down"]


def shard_source(source: Source, which: Projection, rank: int, size: int) -> Source:
    """Return the part of an expert matrix that tensor-parallel rank `rank` of `size` holds.

    Gate and up [I, H] are split along rows, down [H, I] along columns, weights and scales alike.
    A rank holds I / size, which must be a multiple of 32, the scale block of w2 and fp4-mx.

    Raises:
        TensorError: The source is malformed, or I is not a multiple of 32 * size.
        ConfigError: The rank does not exist.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"Tensor-parallel rank {rank} does not exist among {size} ranks.")
    check_structure(source)
    axis = 1 if which == "down" else 0
    length = source.shape[axis]
    if length % (32 * size):
        raise TensorError(
            source.name,
            wanted=f"{'columns' if axis else 'rows'} divisible by 32 x {size} ranks",
            got=f"{length}",
            advice="Choose another tensor-parallel size.",
        )
    start, stop = length // size * rank, length // size * (rank + 1)
    match source:
        case FloatSource():
            return structs.replace(source, weight=_take(source.weight, axis, start, stop))
        case Mxfp4Source():
            return _shard_nibbles(source, axis, start, stop, 32)
        case Nvfp4Source():
            return _shard_nibbles(source, axis, start, stop, 16)
        case Fp8Source():
            return _shard_fp8(source, axis, start, stop)


def _shard_nibbles(source: Any, axis: int, start: int, stop: int, group: int) -> Any:
    per_byte, per_scale = (2, group) if axis else (1, 1)
    nibbles = _take(source.nibbles, axis, start // per_byte, stop // per_byte)
    scale = _take(source.scale, axis, start // per_scale, stop // per_scale)
    return structs.replace(source, nibbles=nibbles, scale=scale)


def _shard_fp8(source: Fp8Source[Any], axis: int, start: int, stop: int) -> Fp8Source[Any]:
    """Slice the scales where the part starts on a block; else give every row (column) its own."""
    block = list(source.block)
    if start % block[axis] == 0:
        scale = _take(source.scale, axis, start // block[axis], -(-stop // block[axis]))
    else:
        index = np.arange(start, stop) // block[axis]
        scale = source.scale[:, index] if axis else source.scale[index]
        block[axis] = 1
    weight = _take(source.weight, axis, start, stop)
    return structs.replace(source, weight=weight, scale=scale, block=(block[0], block[1]))


def _take(array: Any, axis: int, start: int, stop: int) -> Any:
    return array[:, start:stop] if axis else array[start:stop]
