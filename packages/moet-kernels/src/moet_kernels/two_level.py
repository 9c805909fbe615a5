"""Two-level quantisation to NVFP4 on torch: the twin of `moet_core.quantise.fp4_nv_nibbles`.

Plain float64 arithmetic: checkpoints that are served at fp4-nv hold NVFP4 already and are copied.
"""

import torch
from torch import Tensor

from moet_core.floats import E4M3_MAX, E4M3_VALUES
from moet_core.quantise import E2M1_THRESHOLDS, tensor_scale_from_amax
from moet_core.sources import FloatSource, Fp8Source, Source
from moet_kernels.sources import row_ranges, validate

__all__ = ["quantise", "tensor_scale"]


def tensor_scale(source: Source) -> float:
    """Return the tensor scale of a whole, normalised source; TensorError if it is not finite."""
    validate(source)
    amax = max(float(_values(source, *rows).abs().max()) for rows in row_ranges(source))
    return tensor_scale_from_amax(amax, source.name)


def quantise(source: Source, start: int, stop: int, tensor_scale: float) -> tuple[Tensor, Tensor]:
    """Return rows as nibble bytes uint8 [rows, K/2] and E4M3 scales uint8 [rows, K/16]."""
    blocks = _values(source, start, stop).view(stop - start, -1, 16)
    magnitude = blocks.abs()
    scales = _to_e4m3(magnitude.amax(2) / 6 / tensor_scale)
    table = torch.tensor(E4M3_VALUES, device=scales.device)
    step = (table[scales.long()] * tensor_scale).unsqueeze(2)
    index = torch.zeros_like(magnitude, dtype=torch.uint8)
    for threshold in E2M1_THRESHOLDS.tolist():
        index += magnitude > threshold * step
    index *= step > 0
    nibbles = (index | torch.signbit(blocks).to(torch.uint8) << 3).view(stop - start, -1, 2)
    return nibbles[..., 0] | nibbles[..., 1] << 4, scales


def _values(source: Source, start: int, stop: int) -> Tensor:
    assert isinstance(source, FloatSource | Fp8Source)
    weight = source.weight[start:stop]
    if isinstance(source, FloatSource):
        return weight.double()
    rows, columns = source.block
    row_block = torch.arange(start, stop, device=weight.device) // rows
    column_block = torch.arange(weight.shape[1], device=weight.device) // columns
    scale = source.scale[row_block][:, column_block].double()
    return torch.tensor(E4M3_VALUES, device=weight.device)[weight.long()] * scale


def _to_e4m3(values: Tensor) -> Tensor:
    """Twin of `moet_core.floats.float64_to_e4m3` for finite values that are not negative."""
    magnitude = values.clamp(max=E4M3_MAX)
    exponent = torch.frexp(magnitude.clamp(min=2.0**-6)).exponent - 1
    power = ((3 - exponent.long() + 1023) << 52).view(torch.float64)
    return (8 * (exponent + 7) + torch.round(magnitude * power).int() - 8).to(torch.uint8)
