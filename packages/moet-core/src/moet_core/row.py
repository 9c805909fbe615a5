"""The expert row: all bytes of one expert for one tensor-parallel rank.

    codes13 | scales13 | codes2 | scales2 | tensor_scales | zeros up to 4 KiB

codes13 is the plane of w13 [2I, H], gate rows on top of up rows; codes2 that of w2 [H, I], the
down projection. Every section starts at a multiple of 16. `tensor_scales` is three little-endian
float32 (gate, up, down) and a zero, for codecs that have them. The same bytes lie in a pack, in
host memory and in a GPU slot: a fetch is a copy.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from moet_core.codecs import Planes, get_codec
from moet_core.errors import ConfigError
from moet_core.shards import Projection, shard_source
from moet_core.sources import Source

__all__ = [
    "ROW_ALIGNMENT",
    "RowLayout",
    "Section",
    "build_row",
    "check_part",
    "check_row",
    "decode_row",
    "encode_expert",
    "row_layout",
    "shard_source",
    "split_row",
]

Bytes = NDArray[np.uint8]

ROW_ALIGNMENT = 4096
"""Rows are read with O_DIRECT, which wants page-sized offsets and lengths."""

SECTION_ALIGNMENT = 16
"""A GPU lane loads 16 bytes at once."""


class Section(Struct, frozen=True):
    """Bytes `offset` to `end` of a row."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """Offset of the first byte behind."""
        return self.offset + self.length

    @property
    def slice(self) -> slice:
        """The bytes as a slice of a row."""
        return slice(self.offset, self.end)


class RowLayout(Struct, frozen=True, kw_only=True):
    """Where the sections of a row lie; make one with `row_layout`.

    `hidden` is H, `intermediate` is I of this rank. `tensor_scales` is empty for codecs without.
    """

    codec: str
    hidden: int
    intermediate: int
    codes13: Section
    scales13: Section
    codes2: Section
    scales2: Section
    tensor_scales: Section

    @property
    def payload_bytes(self) -> int:
        """Length without the padding at the end."""
        return self.tensor_scales.end

    @property
    def row_bytes(self) -> int:
        """Length of a row, a multiple of 4096."""
        return _align(self.payload_bytes, ROW_ALIGNMENT)

    @property
    def bits_per_weight(self) -> float:
        """Bits of payload for each of the 3 * H * I weights."""
        return 8 * self.payload_bytes / (3 * self.hidden * self.intermediate)


@lru_cache
def row_layout(codec: str, hidden: int, intermediate: int) -> RowLayout:
    """Lay out the row of an expert.

    Args:
        codec: Name of the codec of all three matrices.
        hidden: H, the model's hidden size.
        intermediate: I, the expert's intermediate size on one tensor-parallel rank.

    Raises:
        ConfigError: Unknown codec, or a size that is no positive multiple of 32.
    """
    chosen = get_codec(codec)
    for what, size in (
        ("Hidden size", hidden),
        ("Expert intermediate size of a rank", intermediate),
    ):
        if size <= 0 or size % 32:
            raise ConfigError(
                f"{what} must be a positive multiple of 32, got {size}. "
                "For the intermediate size, another tensor-parallel size may divide it."
            )
    n13, n2 = (2 * intermediate, hidden), (hidden, intermediate)
    lengths = (
        chosen.code_bytes(*n13),
        chosen.scale_bytes(*n13),
        chosen.code_bytes(*n2),
        chosen.scale_bytes(*n2),
        16 if chosen.has_tensor_scale else 0,
    )
    sections, offset = [], 0
    for length in lengths:
        sections.append(Section(offset, length))
        offset = _align(offset + length, SECTION_ALIGNMENT)
    codes13, scales13, codes2, scales2, tensor_scales = sections
    return RowLayout(
        codec=codec,
        hidden=hidden,
        intermediate=intermediate,
        codes13=codes13,
        scales13=scales13,
        codes2=codes2,
        scales2=scales2,
        tensor_scales=tensor_scales,
    )


def check_part(layout: RowLayout, which: Projection, codec: str, shape: tuple[int, int]) -> None:
    """Raise ConfigError unless a matrix of this codec and shape is part of such a row."""
    inner = (layout.intermediate, layout.hidden)
    wanted = inner[::-1] if which == "down" else inner
    if (codec, shape) != (layout.codec, wanted):
        raise ConfigError(
            f"The row's {which} matrix must be {layout.codec} {list(wanted)}, "
            f"got {codec} {list(shape)}."
        )


def check_row(layout: RowLayout, row: Any) -> None:
    """Raise ConfigError unless an array or tensor is uint8 [row_bytes]."""
    dtype = str(row.dtype).removeprefix("torch.")
    if tuple(row.shape) != (layout.row_bytes,) or dtype != "uint8":
        raise ConfigError(
            f"A {layout.codec} row must be uint8 [{layout.row_bytes}], "
            f"got {dtype} {list(row.shape)}."
        )


def build_row(layout: RowLayout, gate: Planes, up: Planes, down: Planes) -> Bytes:
    """Join three encoded matrices into a row uint8 [row_bytes], padded with zeros.

    Rows of 16 are the outermost index of every plane, so that gate's bytes followed by up's are
    the plane of the stacked matrix.

    Raises:
        ConfigError: A matrix has another codec or shape than the layout.
    """
    check_part(layout, "gate", gate.codec, gate.shape)
    check_part(layout, "up", up.codec, up.shape)
    check_part(layout, "down", down.codec, down.shape)
    row = np.zeros(layout.row_bytes, dtype=np.uint8)
    row[layout.codes13.slice] = np.concatenate([gate.codes, up.codes])
    row[layout.scales13.slice] = np.concatenate([gate.scales, up.scales])
    row[layout.codes2.slice] = down.codes
    row[layout.scales2.slice] = down.scales
    if layout.tensor_scales.length:
        scales = [gate.tensor_scale, up.tensor_scale, down.tensor_scale, 0.0]
        row[layout.tensor_scales.slice] = np.array(scales, dtype="<f4").view(np.uint8)
    return row


def split_row(layout: RowLayout, row: Bytes) -> tuple[Planes, Planes, Planes]:
    """Return the gate, up and down planes of a row uint8 [row_bytes], as views of it.

    Raises:
        ConfigError: The row has another length or dtype.
    """
    check_row(layout, row)
    scales: list[float | None] = [None, None, None]
    if layout.tensor_scales.length:
        stored = row[layout.tensor_scales.slice].copy().view("<f4")
        scales = [float(scale) for scale in stored[:3]]
    gate_codes, up_codes = np.split(row[layout.codes13.slice], 2)
    gate_scales, up_scales = np.split(row[layout.scales13.slice], 2)
    inner = (layout.intermediate, layout.hidden)
    gate = Planes(layout.codec, inner, gate_codes, gate_scales, scales[0])
    up = Planes(layout.codec, inner, up_codes, up_scales, scales[1])
    down_codes, down_scales = row[layout.codes2.slice], row[layout.scales2.slice]
    return gate, up, Planes(layout.codec, inner[::-1], down_codes, down_scales, scales[2])


def decode_row(layout: RowLayout, row: Bytes) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return w13 float64 [2I, H] (gate on top of up) and w2 float64 [H, I] of a row, exactly."""
    decode = get_codec(layout.codec).decode
    gate, up, down = split_row(layout, row)
    return np.concatenate([decode(gate), decode(up)]), decode(down)


def encode_expert(
    codec: str,
    gate: Source,
    up: Source,
    down: Source,
    *,
    rank: int = 0,
    size: int = 1,
    zeros: str = "auto",
) -> Bytes:
    """Encode a whole expert into the row uint8 [row_bytes] of one tensor-parallel rank.

    The golden reference of every loader. Decisions about whole tensors are made before sharding.

    Args:
        codec: Name of the codec.
        gate: Gate projection [I, H], not sharded.
        up: Up projection [I, H], not sharded.
        down: Down projection [H, I], not sharded.
        rank: Tensor-parallel rank, 0 <= rank < size.
        size: Tensor-parallel size.
        zeros: How w2 places exact zeros, see `moet_core.quantise.w2_codes`.

    Raises:
        TensorError: A source is malformed, not finite or not divisible by `size`.
        ConfigError: Unknown codec or zeros mode, or shapes that make no expert.
    """
    encode = get_codec(codec).encode

    def planes_of(source: Source, which: Projection) -> Planes:
        return encode(shard_source(source, which, rank, size), zeros=zeros, whole=source)

    planes = planes_of(gate, "gate"), planes_of(up, "up"), planes_of(down, "down")
    intermediate, hidden = planes[0].shape
    return build_row(row_layout(codec, hidden, intermediate), *planes)


def _align(length: int, alignment: int) -> int:
    return -(-length // alignment) * alignment
