"""What a device can do, as answers to questions; the only place that knows GPU generations."""

import os

import torch
from torch import Tensor

from moet_core.errors import ConfigError

__all__ = [
    "BACKENDS",
    "capability",
    "choose_backend",
    "has_async_matrix_units",
    "runs_on_gpu",
    "runs_portable",
    "runs_sm90",
    "runs_sm120",
    "shared_memory_bytes",
    "usable_backends",
]

BACKENDS = ("reference", "portable", "sm120-e4m3", "sm120")
"""Backends of `moet_kernels.experts`, the last one that runs being the default."""

_PORTABLE_SINCE = (8, 0)
"""The first capability with bfloat16 matrix units and asynchronous copies."""

_SHARED_MEMORY = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""KiB of shared memory a block can have, from NVIDIA's programming guide."""


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return a device's compute capability, None if it is no NVIDIA GPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


def runs_on_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU that the Triton kernels run on."""
    found = capability(device)
    return found is not None and found >= _PORTABLE_SINCE


def runs_portable(device: torch.device) -> bool:
    """Whether the Triton kernels run on a device; on a CPU, only in Triton's interpreter."""
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return interpreted or runs_on_gpu(device)


def runs_sm120(device: torch.device) -> bool:
    """Whether a device has the instructions of the SM120 kernels, whose code is for it alone."""
    return capability(device) == (12, 0)


def runs_sm90(device: torch.device) -> bool:
    """Whether a device has warpgroup MMAs, whose code is for sm_90 alone."""
    return capability(device) == (9, 0)


def has_async_matrix_units(number: int) -> bool:
    """Whether matrix units of an architecture (90 for sm_90) read operands from shared memory."""
    return number in (90, 100, 103)


def shared_memory_bytes(number: int) -> int:
    """Return the shared memory a block can have on an architecture (90 for sm_90).

    An architecture that is not known here counts as the smallest one that is.
    """
    return 1024 * _SHARED_MEMORY.get(number, min(_SHARED_MEMORY.values()))


def usable_backends(x: Tensor) -> list[str]:
    """Return the backends that can compute for activations x, the default last."""
    return [name for name in BACKENDS if not _refusal(name, x)]


def choose_backend(x: Tensor, wanted: str | None) -> str:
    """Return the backend to compute with.

    Args:
        x: The activations.
        wanted: A backend, or None for the default.

    Raises:
        ConfigError: No such backend, or one that cannot run here.
    """
    if wanted is None:
        return usable_backends(x)[-1]
    if wanted not in BACKENDS:
        raise ConfigError(f"The backend must be one of {', '.join(BACKENDS)}, got {wanted!r}.")
    refusal = _refusal(wanted, x)
    if refusal:
        raise ConfigError(
            f"The backend {wanted} {refusal}. Usable here: {', '.join(usable_backends(x))}."
        )
    return wanted


def _refusal(backend: str, x: Tensor) -> str | None:
    """Say why a backend cannot compute for x, as the end of a sentence; None if it can."""
    if backend == "reference":
        return None
    found = capability(x.device)
    what = f"device {x.device}" if found is None else "sm_{}{}".format(*found)
    if backend.startswith("sm120") and not runs_sm120(x.device):
        return f"needs an NVIDIA GPU of sm_120, got {what}"
    if not runs_portable(x.device):
        return f"needs an NVIDIA GPU of sm_80 or newer, got {what}"
    if x.dtype != torch.bfloat16:
        return f"needs bfloat16 activations, got {x.dtype}"
    return None
