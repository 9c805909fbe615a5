"""What every launch through CUDA's driver needs."""

import ctypes

__all__ = ["Parameters"]


class Parameters:
    """A kernel's parameters as `cuLaunchKernel` takes them in `extra`; kept until it returns.

    Args:
        packed: The bytes of the kernel's parameter space.

    Attributes:
        address: Of the list for `extra`.
    """

    def __init__(self, packed: bytes) -> None:
        self._buffer = ctypes.create_string_buffer(packed, len(packed))
        self._size = ctypes.c_size_t(len(packed))
        # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END
        buffer, size = ctypes.addressof(self._buffer), ctypes.addressof(self._size)
        self._list = (ctypes.c_void_p * 5)(1, buffer, 2, size, 0)
        self.address = ctypes.addressof(self._list)
