"""Locks host memory, so that a GPU copies out of it by itself."""

from collections.abc import Callable

import torch

from moet_core.errors import ConfigError

__all__ = ["pin"]


def pin(region: memoryview) -> Callable[[], object]:
    """Lock a region of host memory for the GPUs of this process; the result unlocks it.

    It must be unlocked before the memory is freed: a later region at the same address would be
    refused.

    Raises:
        ConfigError: The system does not allow so much locked memory.
    """
    memory = torch.frombuffer(region, dtype=torch.uint8)
    result = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(result) != 0:
        raise ConfigError(
            f"{memory.nbytes:,} bytes of host memory could not be pinned (CUDA error "
            f"{int(result)}). Lower arena, or raise the limit on locked memory (ulimit -l)."
        )
    return lambda: torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
