"""From sources to canonical codes on torch: the twin of `moet_core.quantise`.

A converter reads a range of rows of its source and returns canonical codes as nibble bytes
(uint8 [rows, K/2], one code or nibble of 4 bits a weight, even column low) with the scale bytes
uint8 [rows, K/group]. Ranges start and end at multiples of 16.
"""

from collections.abc import Callable

from torch import Tensor

from moet_core.errors import ConfigError
from moet_core.quantise import (
    BIG_INDEX,
    E2M1_THRESHOLDS,
    check_has_fp4_nv,
    majority_alternates,
)
from moet_core.sources import tensor_scale_of
from moet_kernels import two_level
from moet_kernels.grid import Reader, float_reader, fp8_reader, nvfp4_reader
from moet_kernels.lanes import (
    alternate_zeros,
    as_words,
    count_zeros,
    lanes_of,
    to_codes,
    to_nibble_bytes,
    to_nibbles,
)
from moet_kernels.sources import (
    FloatSource,
    Fp8Source,
    Mxfp4Source,
    Nvfp4Source,
    Source,
    normalised,
    row_ranges,
)

__all__ = ["Converter", "converter", "zeros_alternate"]

Converter = Callable[[int, int], tuple[Tensor, Tensor]]

_THRESHOLDS = [float(threshold) for threshold in E2M1_THRESHOLDS]
_BIG_THRESHOLD = _THRESHOLDS[BIG_INDEX - 1]


def converter(
    codec: str, source: Source, zeros: str, whole: Source
) -> tuple[Converter, float | None]:
    """Return the converter of a normalised, validated source, and the matrix's tensor scale.

    Raises:
        TensorError: The codec is not defined for this format.
        ConfigError: The codec has no torch twin.
    """
    match codec:
        case "w2":
            alternate = zeros == "alternate" or (zeros == "auto" and zeros_alternate(whole))
            return _w2_converter(source, alternate), None
        case "fp4-mx":
            return _fp4_mx_converter(source), None
        case "fp4-nv":
            return _fp4_nv_converter(source, whole)
    raise ConfigError(f"Codec {codec!r} cannot be encoded with torch; use moet_core.get_codec.")


def zeros_alternate(source: Source) -> bool:
    """Twin of `moet_core.quantise.zeros_alternate`; `source` must be the whole tensor."""
    source = normalised(source)
    if isinstance(source, Mxfp4Source):
        return False
    reader = _reader(source)
    zeros = negative = 0
    for start, stop in row_ranges(source):
        more_zeros, more_negative = count_zeros(reader.words(start, stop), reader.lanes)
        zeros, negative = zeros + more_zeros, negative + more_negative
    return majority_alternates(zeros, negative)


def _reader(source: FloatSource | Fp8Source | Nvfp4Source) -> Reader:
    match source:
        case FloatSource():
            return float_reader(source)
        case Fp8Source():
            return fp8_reader(source)
        case Nvfp4Source():
            return nvfp4_reader(source)


def _w2_converter(source: Source, alternate: bool) -> Converter:
    if isinstance(source, Mxfp4Source):
        nibbles = lanes_of(4)
        bias = (8 - BIG_INDEX) * nibbles.ones

        def look_up(start: int, stop: int) -> tuple[Tensor, Tensor]:
            codes = to_codes(as_words(source.nibbles[start:stop]), bias, nibbles)
            return to_nibble_bytes(codes, nibbles), source.scale[start:stop]

        return look_up

    reader = _reader(source)

    def requantise(start: int, stop: int) -> tuple[Tensor, Tensor]:
        words = reader.words(start, stop)
        scales, bias = reader.grid(start, stop, words)
        if alternate:
            words = alternate_zeros(words, reader.lanes)
        codes = to_codes(words, bias(_BIG_THRESHOLD), reader.lanes)
        return to_nibble_bytes(codes, reader.lanes).view(stop - start, -1), scales

    return requantise


def _fp4_mx_converter(source: Source) -> Converter:
    if isinstance(source, Mxfp4Source):
        return _copy(source)
    reader = _reader(source)

    def requantise(start: int, stop: int) -> tuple[Tensor, Tensor]:
        words = reader.words(start, stop)
        scales, bias = reader.grid(start, stop, words)
        nibbles = to_nibbles(words, [bias(threshold) for threshold in _THRESHOLDS], reader.lanes)
        return to_nibble_bytes(nibbles, reader.lanes).view(stop - start, -1), scales

    return requantise


def _fp4_nv_converter(source: Source, whole: Source) -> tuple[Converter, float]:
    if isinstance(source, Nvfp4Source):
        return _copy(source), tensor_scale_of(source)
    check_has_fp4_nv(source)
    whole = normalised(whole)
    tensor_scale = two_level.tensor_scale(whole)

    def quantise(start: int, stop: int) -> tuple[Tensor, Tensor]:
        return two_level.quantise(source, start, stop, tensor_scale)

    return quantise, tensor_scale


def _copy(source: Mxfp4Source | Nvfp4Source) -> Converter:
    return lambda start, stop: (source.nibbles[start:stop], source.scale[start:stop])
