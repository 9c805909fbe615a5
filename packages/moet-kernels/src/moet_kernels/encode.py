"""Encoding and decoding experts on torch, equal to `moet_core`'s golden functions bit for bit.

Sources hold torch tensors (`moet_kernels.sources`); results are on the sources' device or, for
`encode_expert_into`, written into a row anywhere.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moet_core.codecs import get_codec
from moet_core.quantise import check_zeros_mode
from moet_core.row import RowLayout, check_part, check_row
from moet_core.shards import Projection
from moet_kernels import fragments
from moet_kernels.convert import converter, zeros_alternate
from moet_kernels.decode import decode_rows, tensor_scales
from moet_kernels.sources import (
    FloatSource,
    Fp8Source,
    Mxfp4Source,
    Nvfp4Source,
    Source,
    device_of,
    from_numpy,
    normalised,
    row_ranges,
    shard_source,
    validate,
)

__all__ = [
    "EncodedMatrix",
    "FloatSource",
    "Fp8Source",
    "Mxfp4Source",
    "Nvfp4Source",
    "Source",
    "decode_rows",
    "encode_expert_into",
    "encode_matrix",
    "from_numpy",
    "shard_source",
    "tensor_scales",
    "zeros_alternate",
]


class EncodedMatrix(NamedTuple):
    """Planes uint8 1-D of one matrix, and the tensor scale of codecs that have one."""

    codes: Tensor
    scales: Tensor
    tensor_scale: float | None


def encode_matrix(
    codec: str, source: Source, *, zeros: str = "auto", whole: Source | None = None
) -> EncodedMatrix:
    """Encode a matrix [N, K] on its device; the twin of `Codec.encode`.

    Args:
        codec: "w2", "fp4-mx" or "fp4-nv".
        source: What the checkpoint stores, or a shard of it.
        zeros: How w2 places exact zeros, see `moet_core.quantise.w2_codes`.
        whole: The source that `source` is a shard of; decisions about the tensor are made on it.

    Raises:
        TensorError: The source is malformed, not finite, or not representable.
        ConfigError: Unknown codec or zeros mode.
    """
    chosen, source = get_codec(codec), normalised(source)
    (n, k), device = source.shape, device_of(source)
    codes = torch.empty(chosen.code_bytes(n, k), dtype=torch.uint8, device=device)
    scales = torch.empty(chosen.scale_bytes(n, k), dtype=torch.uint8, device=device)
    tensor_scale = _encode_into(codec, source, codes, scales, zeros, whole)
    return EncodedMatrix(codes, scales, tensor_scale)


def encode_expert_into(
    row: Tensor,
    layout: RowLayout,
    gate: Source,
    up: Source,
    down: Source,
    *,
    rank: int = 0,
    size: int = 1,
    zeros: str | tuple[str, str, str] = "auto",
) -> None:
    """Encode a whole expert into every byte of a row; the twin of `moet_core.row.encode_expert`.

    Args:
        row: uint8 [row_bytes], contiguous, on any device.
        layout: Layout of the row; its intermediate size is that of one rank.
        gate: Gate projection [I * size, H], not sharded.
        up: Up projection [I * size, H], not sharded.
        down: Down projection [H, I * size], not sharded.
        rank: Tensor-parallel rank whose part is encoded.
        size: Tensor-parallel size.
        zeros: A mode for all three matrices or one each. Whoever passes matrices that are already
            sharded (with size 1) must decide "sign" or "alternate" on the whole ones.

    Raises:
        TensorError: A source is malformed, not finite or not divisible by `size`.
        ConfigError: Unknown zeros mode, or a row or shapes other than the layout's.
    """
    check_row(layout, row)
    gate_zeros, up_zeros, down_zeros = (zeros,) * 3 if isinstance(zeros, str) else zeros
    gate_codes, up_codes = row[layout.codes13.slice].chunk(2)
    gate_scales, up_scales = row[layout.scales13.slice].chunk(2)
    down_codes, down_scales = row[layout.codes2.slice], row[layout.scales2.slice]

    def put(
        source: Source, which: Projection, codes: Tensor, scales: Tensor, mode: str
    ) -> float | None:
        shard = normalised(shard_source(source, which, rank, size))
        check_part(layout, which, layout.codec, shard.shape)
        return _encode_into(layout.codec, shard, codes, scales, mode, source)

    scale_of_each = [
        put(gate, "gate", gate_codes, gate_scales, gate_zeros),
        put(up, "up", up_codes, up_scales, up_zeros),
        put(down, "down", down_codes, down_scales, down_zeros),
    ]
    if layout.tensor_scales.length:
        stored = torch.tensor([*scale_of_each, 0.0], dtype=torch.float32).view(torch.uint8)
        row[layout.tensor_scales.slice] = stored.to(row.device)
    row[layout.payload_bytes :] = 0


def _encode_into(
    codec: str, source: Source, codes: Tensor, scales: Tensor, zeros: str, whole: Source | None
) -> float | None:
    """Encode a normalised source into its planes and return its tensor scale."""
    check_zeros_mode(zeros)
    validate(source)
    group = get_codec(codec).scale_group
    convert, tensor_scale = converter(codec, source, zeros, whole or source)
    n = source.shape[0]
    pack = fragments.pack_codes2 if codec == "w2" else fragments.pack_nibbles
    for start, stop in row_ranges(source):
        nibble_bytes, row_scales = convert(start, stop)
        pack(nibble_bytes, codes[_part(codes, start, stop, n)])
        fragments.pack_scales(row_scales, group, scales[_part(scales, start, stop, n)])
    return tensor_scale


def _part(plane: Tensor, start: int, stop: int, n: int) -> slice:
    row = plane.numel() // n
    return slice(row * start, row * stop)
