"""Loading and launching cubins: through NVIDIA's driver, or whatever has the same two methods."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from moet_core.errors import MoetError
from moet_kernels.launching import Parameters

__all__ = ["CudaDriver", "Driver", "DriverError"]


class DriverError(MoetError):
    """The driver refused a cubin or a launch."""


class Driver(Protocol):
    """What launches kernels on one device."""

    device: torch.device

    @property
    def identity(self) -> str:
        """The device and the driver, as far as a kernel's behaviour may depend on them."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Take memory on the device."""

    def load(self, image: bytes, kernel: str) -> Any:
        """Load a cubin and return its kernel.

        Raises:
            DriverError: the driver refuses it.
        """

    def launch(
        self,
        function: Any,
        grid: tuple[int, int, int],
        threads: int,
        parameters: bytes,
        tensors: Sequence[Tensor],
    ) -> None:
        """Start a kernel.

        Args:
            function: from `load`.
            grid: blocks.
            threads: threads a block.
            parameters: as they lie in the kernel's parameter space.
            tensors: everything that the kernel may read or write.

        Raises:
            DriverError: the driver refuses it.
        """


class CudaDriver:
    """An NVIDIA GPU; launches go to torch's current stream, so that CUDA graphs capture them.

    Raises:
        DriverError: the driver's Python bindings are missing.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise DriverError(
                f"The SM120 kernels need the package cuda-bindings, which does not import: {error}."
            ) from error
        self.device = device
        self._driver = driver
        self._modules: list[Any] = []

    def _check(self, result: tuple[Any, ...]) -> Any:
        code, *values = result
        if int(code):
            raise DriverError(f"The CUDA driver says {getattr(code, 'name', code)}.")
        return values[0] if len(values) == 1 else values

    @property
    def identity(self) -> str:
        """Name, capability, and version of the driver."""
        properties = torch.cuda.get_device_properties(self.device)
        version = self._check(self._driver.cuDriverGetVersion())
        return f"{properties.name} {properties.major}.{properties.minor} driver {version}"

    def is_capturing(self) -> bool:
        """Whether launches go into a CUDA graph instead of running."""
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Take memory from torch's caching allocator."""
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def load(self, image: bytes, kernel: str) -> Any:
        """Load a cubin and return its kernel; see `Driver.load`."""
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().synchronize()  # makes torch's context the current one
            module = self._check(self._driver.cuModuleLoadData(image))
            self._modules.append(module)
            return self._check(self._driver.cuModuleGetFunction(module, kernel.encode()))

    def launch(
        self,
        function: Any,
        grid: tuple[int, int, int],
        threads: int,
        parameters: bytes,
        tensors: Sequence[Tensor],
    ) -> None:
        """Start a kernel; see `Driver.launch`."""
        del tensors  # the GPU sees all memory
        packed = Parameters(parameters)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self._check(
            self._driver.cuLaunchKernel(
                function, *grid, threads, 1, 1, 0, stream, 0, packed.address
            )
        )
