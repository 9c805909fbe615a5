"""The CUDA kernels on tensors of the CPU: machine code in our emulator.

For tests and for whoever changes a kernel; slow. `emulating` teaches the emulator what nvcc uses
here and the hand-written kernels do not. What runs beside the threads, copies and warpgroup MMAs,
has its effect when it is waited for and not before: `emulated_copies`, `emulated_wgmma`.
"""

import ctypes
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet_kernels.portable import emulated_copies, emulated_ops, emulated_wgmma
from moet_kernels.portable.cuts import CUTS
from moet_kernels.portable.native import Native
from moet_kernels.portable.native_tiles import Tiles
from moet_kernels.portable.tier import Tier
from moet_kernels.portable.tile_cuts import TileCut
from moet_kernels.sass import emulate as emulator
from moet_kernels.sass.assemble import disassemble
from moet_kernels.sass.cubin import Cubin
from moet_kernels.sass.machine import Buffer, File, Machine, Mask, Words
from moet_kernels.sass.source import Program

__all__ = ["EmulatedModule", "EmulatedNative", "EmulatedTiles", "emulating"]

_PROCESSORS = 3
"""So few that blocks compute several tiles, one after the other."""

_STACK_POINTER = 1


class EmulatedModule:
    """Kernels of a cubin for sm_90 on the CPU: what `Module` is on a GPU.

    Attributes: `launches`, the kernels started, in order.
    """

    def __init__(self, image: bytes) -> None:
        self.device = torch.device("cpu")
        self.overlap = True
        self.launches: list[str] = []
        self._cubin = Cubin(image)
        self._programs: dict[str, Program] = {}
        self._tensors: list[Tensor] = []
        # Results are kept, so that no other tensor comes to lie at the address of one.
        self._results: dict[int, tuple[Tensor, NDArray[np.bool_]]] = {}

    def lend(self, tensors: Iterable[Tensor], out: Tensor) -> None:
        """Name the tensors that the next kernel reads, and the one that it writes."""
        self._tensors = [*tensors, out]
        self._results.setdefault(out.data_ptr(), (out, np.zeros(out.nbytes, bool)))

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
        """Run a kernel to its end."""
        del after
        self.launches.append(name)
        launch = emulator.Launch((*grid, 1), threads, packed, shared)
        buffers = [self._buffer(tensor) for tensor in self._tensors]
        emulator.emulate(self.program(name), launch, buffers)

    def program(self, name: str) -> Program:
        """Return a kernel's machine code."""
        found = self._programs.get(name)
        if found is None:
            found = self._programs[name] = disassemble(self._cubin, name)
        return found

    def _buffer(self, tensor: Tensor) -> Buffer:
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        known = self._results.get(tensor.data_ptr())
        written = np.ones(data.size, bool) if known is None else known[1]
        return Buffer(tensor.data_ptr(), data, written)


class EmulatedNative(EmulatedModule, Native):
    """The CUDA kernels of a decode step; see `Native`."""

    def __init__(self, image: bytes, *, processors: int = _PROCESSORS) -> None:
        super().__init__(image)
        self.cuts = CUTS
        self.processors = processors

    def limbs(self, x: Tensor, out: Tensor) -> None:
        """See `Native.limbs`."""
        self.lend([x], out)
        super().limbs(x, out)

    def combine(
        self, out: Tensor, parts: Tensor, weights: Tensor, topk_ids: Tensor, base: Tier,
        fine: Tier | None, *, after: bool = False,
    ) -> None:  # fmt: skip
        """See `Native.combine`."""
        slots = [tier.slot_of for tier in (base, fine) if tier is not None]
        self.lend([parts, weights, topk_ids, *slots], out)
        super().combine(out, parts, weights, topk_ids, base, fine, after=after)

    def _stream(
        self, x: Tensor, out: Tensor, topk_ids: Tensor, tier: Tier, preferred: Tier | None,
        *more: Any, **flags: Any,
    ) -> None:  # fmt: skip
        tables = [preferred.slot_of] if preferred else []
        tables += [each for each in more if isinstance(each, Tensor)]
        self.lend([x, topk_ids, tier.pool, tier.slot_of, *tables], out)
        super()._stream(x, out, topk_ids, tier, preferred, *more, **flags)


class EmulatedTiles(EmulatedModule, Tiles):
    """The CUDA kernels of prefill; see `Tiles`."""

    def ordered(self, x: Tensor, codec: str) -> Tensor:
        """See `Tiles.ordered`."""
        self._tensors = [x]
        out = super().ordered(x, codec)
        self._results[out.data_ptr()] = out, self._results[out.data_ptr()][1]  # its owner
        return out

    def launch(
        self, name: str, grid: tuple[int, int], threads: int, packed: bytes, **more: Any
    ) -> None:
        """See `EmulatedModule.launch`."""
        if name == "order":  # of its result, made by `ordered`, only the address is known here
            _, address, columns, _ = struct.unpack("<2Q2i", packed)
            memory = (ctypes.c_uint8 * (grid[0] * columns * 2)).from_address(address)
            self.lend(self._tensors, torch.frombuffer(memory, dtype=torch.bfloat16))
        super().launch(name, grid, threads, packed, **more)

    def _tiles(
        self, cut: TileCut, x: Tensor, out: Tensor, top_k: int, groups: tuple[Tensor, Tensor],
        tier: Tier, preferred: Tier | None, swiglu_limit: float,
    ) -> None:  # fmt: skip
        tables = [preferred.slot_of] if preferred else []
        self.lend([x, *groups, tier.pool, tier.slot_of, *tables], out)
        super()._tiles(cut, x, out, top_k, groups, tier, preferred, swiglu_limit)


@contextmanager
def emulating() -> Iterator[None]:
    """Let the emulator run the kernels, and forget afterwards what it learnt."""
    operations = dict(emulator._OPERATIONS)
    begin, read, write = Machine.__init__, Machine.read, Machine.write

    def with_garbage(machine: Machine, *arguments: Any) -> None:
        # nvcc changes half of a register that nobody wrote, if nobody uses the other half
        begin(machine, *arguments)
        file = machine.vector
        garbage = np.random.default_rng(7).integers(0, 2**32, file.registers.shape, np.uint32)
        file.registers[: file.zero] = garbage[: file.zero] & 0x3F3F3F3F  # finite as any number
        file.registers[_STACK_POINTER] = 0
        file.known[:] = True

    def read_settled(machine: Machine, file: File, number: int, mask: Mask) -> Words:
        emulated_wgmma.refuse_in_flight(machine, file, number, mask)
        return read(machine, file, number, mask)

    def write_settled(
        machine: Machine, file: File, number: int, value: Words | np.uint32, mask: Mask
    ) -> None:
        emulated_wgmma.refuse_in_flight(machine, file, number, mask)
        emulated_wgmma.note_write(machine, file, number, mask)
        write(machine, file, number, value, mask)

    for module in (emulated_ops, emulated_copies, emulated_wgmma):
        emulator._OPERATIONS.update(module.OPERATIONS)
    changed = {"__init__": with_garbage, "read": read_settled, "write": write_settled}
    for name, function in changed.items():
        setattr(Machine, name, function)
    try:
        yield
    finally:
        for name, function in (("__init__", begin), ("read", read), ("write", write)):
            setattr(Machine, name, function)
        emulator._OPERATIONS.clear()
        emulator._OPERATIONS.update(operations)
