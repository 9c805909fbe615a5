"""The first GPU, through the driver."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moet_kernels.launching import Parameters

__all__ = ["Device", "DriverError"]

_WARM_UP = 3


class DriverError(RuntimeError):
    """The driver returned an error code; after some, the context is lost."""


class Device:
    """The first GPU."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.driver = driver
        self._check(driver.cuInit(0))
        self.device = self._check(driver.cuDeviceGet(0))
        context = self._check(driver.cuDevicePrimaryCtxRetain(self.device))
        self._check(driver.cuCtxSetCurrent(context))

    def _check(self, result: tuple) -> Any:
        code, *values = result
        if int(code):
            raise DriverError(getattr(code, "name", str(code)))
        return values[0] if len(values) == 1 else values

    def name(self) -> str:
        """What the GPU is called."""
        raw = self._check(self.driver.cuDeviceGetName(64, self.device))
        return raw.split(b"\0")[0].decode()

    def cuda_version(self) -> int:
        """CUDA version of the driver, 1000 * major + 10 * minor."""
        return int(self._check(self.driver.cuDriverGetVersion()))

    def load(self, image: bytes) -> Any:
        """Load a cubin."""
        return self._check(self.driver.cuModuleLoadData(image))

    def unload(self, module: Any) -> None:
        """Forget a cubin."""
        self._check(self.driver.cuModuleUnload(module))

    def function(self, module: Any, kernel: str) -> Any:
        """Find a kernel of a loaded cubin."""
        return self._check(self.driver.cuModuleGetFunction(module, kernel.encode()))

    def upload(self, array: NDArray) -> int:
        """Copy an array to the GPU and return its address."""
        address = self.allocate(max(array.nbytes, 256))
        self.refill(address, array)
        return address

    def refill(self, address: int, array: NDArray) -> None:
        """Copy an array to memory taken before."""
        data = np.ascontiguousarray(array)
        self._check(self.driver.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes))

    def allocate(self, size: int) -> int:
        """Take memory."""
        return int(self._check(self.driver.cuMemAlloc(size)))

    def free(self, *addresses: int) -> None:
        """Give memory back."""
        for address in addresses:
            self._check(self.driver.cuMemFree(address))

    def poison(self, address: int, size: int) -> None:
        """Fill with a pattern that no kernel writes."""
        self._check(self.driver.cuMemsetD8Async(address, 0xA5, size, 0))

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy within the GPU."""
        self._check(self.driver.cuMemcpyDtoDAsync(target, source, size, 0))

    def download(self, address: int, size: int) -> NDArray[np.uint8]:
        """Copy memory back."""
        data = np.empty(size, np.uint8)
        self._check(self.driver.cuMemcpyDtoH(data.ctypes.data, address, size))
        return data

    def launch(
        self, function: Any, grid: tuple[int, int, int], threads: int, parameters: bytes
    ) -> None:
        """Start a kernel; `parameters` as they lie in its parameter space."""
        packed = Parameters(parameters)
        self._check(
            self.driver.cuLaunchKernel(function, *grid, threads, 1, 1, 0, 0, 0, packed.address)
        )

    def wait(self) -> None:
        """Wait until all is done."""
        self._check(self.driver.cuCtxSynchronize())

    def time(self, work: Callable[[], None], count: int) -> list[float]:
        """Microseconds of `count` runs of `work`, by device events."""
        events = [self._check(self.driver.cuEventCreate(0)) for _ in range(count + 1)]
        for _ in range(_WARM_UP):
            work()
        self._check(self.driver.cuEventRecord(events[0], 0))
        for event in events[1:]:
            work()
            self._check(self.driver.cuEventRecord(event, 0))
        self.wait()
        return [
            1000 * float(self._check(self.driver.cuEventElapsedTime(first, second)))
            for first, second in itertools.pairwise(events)
        ]
