"""The NVFP4 grid in torch, one definition for training and for export; and W2 after it.

value = e2m1 * e4m3 block scale (16 weights along k) * float32 tensor scale. The tensor scale is a
power of two here, so that e2m1 * e4m3 * scale has six significant bits and is exact in bfloat16:
a bf16 copy of the experts computes with the very same numbers.
"""

import torch
from torch import Tensor

__all__ = ["GROUP", "fake_quantise", "fake_w2", "quantise"]

GROUP = 16
W2_GROUP = 32
W2_MIDPOINT = 2.5  # between e2m1 magnitudes 2 and 3
E2M1_LARGEST = 6.0
E4M3_LARGEST = 448.0
E4M3_SMALLEST = 2.0**-9
# Between the e2m1 magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; a tie goes to the lower one.
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def _scales(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3-valued block scales float32 `[..., N, K/16]` and tensor scales `[...]`."""
    blocks = weight.unflatten(-1, (-1, GROUP)).abs().amax(-1)
    largest = blocks.amax((-2, -1)).clamp(min=2.0**-100)
    tensor = torch.exp2(torch.ceil(torch.log2(largest / (E2M1_LARGEST * E4M3_LARGEST))))
    scale = blocks / (E2M1_LARGEST * tensor[..., None, None])
    scale = scale.clamp(E4M3_SMALLEST, E4M3_LARGEST).to(torch.float8_e4m3fn).float()
    return scale, tensor


def _magnitudes(units: Tensor) -> Tensor:
    """Round |units| to e2m1: steps of 0.5 below 2, of 1 below 4, of 2 above."""
    size = units.abs().clamp(max=E2M1_LARGEST)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.ceil(size / step - 0.5) * step


def fake_quantise(weight: Tensor) -> Tensor:
    """Return float32 `[..., N, K]` rounded to NVFP4; the gradient passes straight through."""
    exact = weight.detach()
    scale, tensor = _scales(exact)
    unit = (scale * tensor[..., None, None]).unsqueeze(-1)
    units = exact.unflatten(-1, (-1, GROUP)) / unit
    rounded = (torch.copysign(_magnitudes(units), units) * unit).flatten(-2)
    return weight + (rounded - exact)


def fake_w2(weight: Tensor) -> Tensor:
    """Return float32 `[..., N, K]` as moet serves it with W2; the gradient passes straight through.

    W2 starts from the NVFP4 values: e2m1 magnitudes up to 2 of a power-of-two grid per 32 weights
    become 1, larger ones 4 (docs/formats.md). Zeros take their sign bit.
    """
    exact = fake_quantise(weight.detach()).unflatten(-1, (-1, W2_GROUP))
    largest = exact.abs().amax(-1, keepdim=True).clamp(min=2.0**-120)
    unit = torch.exp2(torch.round(torch.log2(largest / E2M1_LARGEST)))
    size = torch.where(exact.abs() / unit <= W2_MIDPOINT, 1.0, 4.0)
    # The sign of the weight itself: an exact zero has lost its own in the sum of fake_quantise.
    rounded = torch.copysign((size * unit).flatten(-2), weight.detach())
    return weight + (rounded - weight.detach())


def quantise(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a modelopt checkpoint stores of float32 `[..., N, K]`.

    Returns:
        uint8 `[..., N, K/2]` (low nibble = even k), e4m3 `[..., N, K/16]`, float32 `[...]`.
    """
    scale, tensor = _scales(weight)
    units = weight.unflatten(-1, (-1, GROUP)) / (scale * tensor[..., None, None]).unsqueeze(-1)
    bounds = torch.tensor(MIDPOINTS, dtype=torch.float32)
    index = torch.bucketize(_magnitudes(units), bounds).to(torch.uint8)
    nibbles = (index | (torch.signbit(units).to(torch.uint8) << 3)).flatten(-2)
    packed = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return packed, scale.to(torch.float8_e4m3fn), tensor
