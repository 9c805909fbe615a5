"""A file of compiled CUDA kernels on one device: loaded, and launched on the current stream."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from moet_core.errors import MoetError
from moet_kernels.launching import Parameters

__all__ = ["Module", "NativeError", "index_of", "loaded"]


class NativeError(MoetError):
    """The CUDA kernels cannot be loaded or launched."""


class Module:
    """Compiled kernels on one device.

    Args:
        device: A GPU that the image is for.
        image: PTX, or a cubin of the device's architecture.
        names: Of its kernels.
        overlap: Whether a kernel may start before the one in front has ended, as compiled for
            sm_90 and newer.

    Raises:
        NativeError: The driver or its Python bindings refuse.
    """

    def __init__(
        self, device: torch.device, image: bytes, names: Iterable[str], *, overlap: bool
    ) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise NativeError(f"cuda-bindings does not import: {error}") from error
        self.device = device
        self.overlap = overlap
        self._driver = driver
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes torch's context the current one
            self._module = self.check(driver.cuModuleLoadData(image))
        self._functions = {name: self._function(name) for name in names}

    def _function(self, name: str) -> Any:
        return self.check(self._driver.cuModuleGetFunction(self._module, name.encode()))

    def check(self, result: tuple[Any, ...], launched: str = "") -> Any:
        """Return what a call of the driver gave."""
        code, *values = result
        if int(code):
            where = f"at the launch of {launched} on {self.device} " if launched else ""
            raise NativeError(f"{where}the CUDA driver says {getattr(code, 'name', code)}")
        return values[0] if values else None

    def allow_shared(self, name: str, size: int) -> None:
        """Let a kernel be launched with `size` bytes of shared memory beside its own."""
        what = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.check(self._driver.cuFuncSetAttribute(self._functions[name], what, size))

    def launch(
        self,
        name: str,
        grid: tuple[int, int],
        threads: int,
        packed: bytes,
        *,
        shared: int = 0,
        after: bool = False,
    ) -> None:
        """Launch a kernel.

        Args:
            name: Its name.
            grid: Blocks.
            threads: Of a block.
            packed: The bytes of its parameters.
            shared: Bytes of shared memory beside the kernel's own.
            after: It may start before the one in front has ended, and waits for it by itself.
        """
        driver = self._driver
        parameters = Parameters(packed)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        function = self._functions[name]
        if not (after and self.overlap):
            extra = parameters.address
            self.check(
                driver.cuLaunchKernel(function, *grid, 1, threads, 1, 1, shared, stream, 0, extra),
                name,
            )
            return
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        config.hStream = stream
        attribute = driver.CUlaunchAttribute()
        attribute.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
        self.check(driver.cuLaunchKernelEx(config, function, 0, parameters.address), name)


ModuleT = TypeVar("ModuleT", bound=Module)


def index_of(device: torch.device) -> int:
    """Return the number of a GPU, the current one's if the device has none."""
    return torch.cuda.current_device() if device.index is None else device.index


def loaded(what: str, index: int, load: Callable[[torch.device], ModuleT]) -> ModuleT | None:
    """Load kernels for a GPU; None, after a warning that says why, where they do not load.

    Args:
        what: What the kernels compute, for the warning.
        index: Of the GPU.
        load: Makes the module, or raises NativeError or OSError.
    """
    device = torch.device("cuda", index)
    try:
        return load(device)
    except (NativeError, OSError) as error:
        warnings.warn(
            f"The CUDA kernels of {what} do not load on {device} ({error}); slower Triton kernels "
            "compute instead.",
            stacklevel=3,
        )
        return None
