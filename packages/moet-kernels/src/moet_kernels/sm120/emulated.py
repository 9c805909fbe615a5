"""A driver that runs cubins in the emulator, on tensors of the CPU."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moet_kernels.sass.assemble import disassemble
from moet_kernels.sass.cubin import Cubin
from moet_kernels.sass.emulate import Launch, emulate
from moet_kernels.sass.errors import SassError
from moet_kernels.sass.machine import Buffer
from moet_kernels.sass.source import Program
from moet_kernels.sm120.driver import DriverError

__all__ = ["EmulatedDriver"]


class EmulatedDriver:
    """Launches run at once; reading what nothing wrote and leaving a tensor are errors.

    `nvdisasm` must be there. Attributes: `launches`, the kernels started, in order.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.identity = "emulator"
        self.launches: list[str] = []
        # Tensors are kept, so that no other comes to lie at the address of one.
        self._made: dict[int, tuple[Tensor, np.ndarray]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Take memory in which nothing is written yet."""
        tensor = torch.empty(shape, dtype=dtype)
        self._made[tensor.data_ptr()] = (tensor, np.zeros(tensor.nbytes, bool))
        return tensor

    def load(self, image: bytes, kernel: str) -> Program:
        """Read a kernel of a cubin; see `Driver.load`."""
        try:
            return disassemble(Cubin(image), kernel)
        except SassError as error:
            raise DriverError(str(error)) from error

    def launch(
        self,
        function: Program,
        grid: tuple[int, int, int],
        threads: int,
        parameters: bytes,
        tensors: Sequence[Tensor],
    ) -> None:
        """Run a kernel; see `Driver.launch`.

        Raises:
            EmulationError: the kernel does what hardware would leave undefined.
        """
        self.launches.append(function.kernel)
        buffers = [self._buffer(tensor) for tensor in tensors if tensor.numel()]
        emulate(function, Launch(grid, threads, parameters), buffers)

    def _buffer(self, tensor: Tensor) -> Buffer:
        if not tensor.is_contiguous():
            raise DriverError(f"A tensor {list(tensor.shape)} is not contiguous.")
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        made = self._made.get(tensor.data_ptr())
        written = np.ones(data.size, bool)
        if made is not None and made[1].size == data.size:
            written = made[1]
        return Buffer(tensor.data_ptr(), data, written)
