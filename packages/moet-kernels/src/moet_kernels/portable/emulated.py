"""The CUDA kernels of a decode step on tensors of the CPU: machine code in our emulator.

For tests and for whoever changes a kernel; slow. `emulating` teaches the emulator what nvcc uses
here and the hand-written kernels do not. A copy that runs beside the threads reaches shared memory
when it is waited for and not before, so that reading too early finds nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet_kernels.portable.cuts import CUTS
from moet_kernels.portable.native import Native
from moet_kernels.portable.tier import Tier
from moet_kernels.sass import emulate as emulator
from moet_kernels.sass.assemble import disassemble
from moet_kernels.sass.cubin import Cubin
from moet_kernels.sass.machine import WARP, Buffer, File, Machine, Mask
from moet_kernels.sass.memory_ops import _addresses
from moet_kernels.sass.source import Program, Statement
from moet_kernels.sass.values import integer, raw

__all__ = ["EmulatedNative", "emulating"]

_PROCESSORS = 3
"""So few that blocks compute several tiles, one after the other."""

_STACK_POINTER = 1


class EmulatedNative(Native):
    """The CUDA kernels, of a cubin for sm_90, on the CPU; see `Native`.

    Attributes: `launches`, the kernels started, in order.
    """

    def __init__(self, image: bytes, *, processors: int = _PROCESSORS) -> None:
        self.device = torch.device("cpu")
        self.cuts = CUTS
        self.processors = processors
        self.launches: list[str] = []
        self.overlap = True
        self._cubin = Cubin(image)
        self._programs: dict[str, Program] = {}
        self._tensors: list[Tensor] = []
        # Results are kept, so that no other tensor comes to lie at the address of one.
        self._results: dict[int, tuple[Tensor, NDArray[np.bool_]]] = {}

    def combine(
        self, out: Tensor, parts: Tensor, weights: Tensor, topk_ids: Tensor, base: Tier,
        fine: Tier | None, *, after: bool = False,
    ) -> None:  # fmt: skip
        """See `Native.combine`."""
        self._tensors = [parts, weights, topk_ids, base.slot_of]
        self._tensors += [fine.slot_of] if fine else []
        self._add_result(out)
        super().combine(out, parts, weights, topk_ids, base, fine, after=after)

    def _stream(
        self, x: Tensor, out: Tensor, topk_ids: Tensor, tier: Tier, preferred: Tier | None,
        *more: Any, **flags: Any,
    ) -> None:  # fmt: skip
        self._tensors = [x, topk_ids, tier.pool, tier.slot_of]
        self._tensors += [preferred.slot_of] if preferred else []
        self._tensors += [each for each in more if isinstance(each, Tensor)]
        self._add_result(out)
        super()._stream(x, out, topk_ids, tier, preferred, *more, **flags)

    def _add_result(self, out: Tensor) -> None:
        self._tensors.append(out)
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
        del shared, after
        self.launches.append(name)
        program = self._programs.get(name)
        if program is None:
            program = self._programs[name] = disassemble(self._cubin, name)
        launch = emulator.Launch((*grid, 1), threads, packed)
        emulator.emulate(program, launch, [self._buffer(tensor) for tensor in self._tensors])

    def _buffer(self, tensor: Tensor) -> Buffer:
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        known = self._results.get(tensor.data_ptr())
        written = np.ones(data.size, bool) if known is None else known[1]
        return Buffer(tensor.data_ptr(), data, written)


@contextmanager
def emulating() -> Iterator[None]:
    """Let the emulator run the kernels, and forget afterwards what it learnt."""
    before, begin = dict(emulator._OPERATIONS), Machine.__init__

    def with_garbage(machine: Machine, *arguments: Any) -> None:
        # nvcc changes half of a register that nobody wrote, if nobody uses the other half
        begin(machine, *arguments)
        file = machine.vector
        garbage = np.random.default_rng(7).integers(0, 2**32, file.registers.shape, np.uint32)
        file.registers[: file.zero] = garbage[: file.zero] & 0x3F3F3F3F  # finite as any number
        file.registers[_STACK_POINTER] = 0
        file.known[:] = True

    emulator._OPERATIONS.update(_OPERATIONS)
    Machine.__init__ = with_garbage  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Machine.__init__ = begin  # type: ignore[method-assign]
        emulator._OPERATIONS.clear()
        emulator._OPERATIONS.update(before)


def _words(machine: Machine, value: Any) -> NDArray[np.uint32]:
    return np.broadcast_to(np.asarray(value), machine.count).astype(np.uint32)


def _vote(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """VOTE.ANY d, PT, p: which lanes have the predicate, in a register of theirs or of the warp."""
    d, _, p = statement.instruction.operands
    held = (machine.read_predicate(machine.vector, p, mask) & mask).reshape(-1, WARP)
    ballot = (held.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(axis=1)
    words = ballot.astype(np.uint32)
    if d.template == "UR":
        machine.write(machine.uniform, d.values[0], words, mask.reshape(-1, WARP).any(axis=1))
    else:
        machine.write(file, d.values[0], np.repeat(words, WARP), mask)


def _add_then_least(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """VIADDMNMX d, a, b, c, p: the lesser of a + b and c, without p the greater."""
    d, a, b, c, least = statement.instruction.operands
    x, y, z = (_words(machine, integer(machine, file, each, mask)) for each in (a, b, c))
    kind: Any = np.uint32 if "U32" in statement.instruction.modifiers else np.int32
    total, other = (x + y).view(kind), z.view(kind)
    wanted = machine.read_predicate(file, least, mask)
    found = np.where(wanted, np.minimum(total, other), np.maximum(total, other))
    machine.write(file, d.values[0], np.ascontiguousarray(found).view(np.uint32), mask)


def _atomic_add(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """REDG.ADD, ATOMG.ADD of 32 bits, whose old value nobody reads."""
    place, source = statement.instruction.operands[-2:]
    addends = _words(machine, integer(machine, file, source, mask))
    addresses = _addresses(machine, file, place, mask)
    for buffer, threads, offset in machine.global_index(addresses, 4, mask):
        np.add.at(buffer.data.view(np.uint32), offset // 4, addends[threads])


def _special_function(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """MUFU.EX2, MUFU.RCP, to the nearest float32."""
    d, a = statement.instruction.operands
    value = _words(machine, raw(machine, file, a, mask)).view(np.float32).astype(np.float64)
    value = np.abs(value) if a.absolute else value
    value = -value if a.negate else value
    function: Callable[..., Any] = {"EX2": np.exp2, "RCP": np.reciprocal}[
        statement.instruction.modifiers[0]
    ]
    with np.errstate(all="ignore"):
        found = function(value).astype(np.float32)
    machine.write(file, d.values[0], found.view(np.uint32), mask)


def _multiply_pairs(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """HMUL2.BF16_V2: products of pairs of bfloat16 that are exact, or it is an error."""
    d, a, b, *low_half = statement.instruction.operands
    halves = []
    for operand in (a, b):
        if operand.template == "H":  # two immediates
            words = _words(machine, operand.values[0] << 16 | low_half[0].values[0])
        else:
            words = np.where(mask, _words(machine, raw(machine, file, operand, mask)), 0)
        if operand.negate:
            raise machine.unsupported(statement.text)
        halves.append([(words << shift & 0xFFFF0000).astype(np.uint32) for shift in (16, 0)])
    products = [x.view(np.float32) * y.view(np.float32) for x, y in zip(*halves, strict=True)]
    low, high = (product.view(np.uint32) for product in products)
    if ((low | high) & 0xFFFF).any():
        raise machine.unsupported("a product of bfloat16 that has to be rounded")
    machine.write(file, d.values[0], low >> np.uint32(16) | high, mask)


def _start_copy(machine: Machine, file: File, statement: Statement, mask: Mask) -> None:
    """LDGSTS.128: its bytes are taken now, and lie in shared memory once they are waited for."""
    places = [each for each in statement.instruction.operands if "[" in each.template]
    if "128" not in statement.instruction.modifiers:
        raise machine.unsupported(statement.text)
    at = machine.shared_index(_addresses(machine, file, places[0], mask), 16, mask)
    data = np.zeros((machine.count, 16), np.uint8)
    addresses = _addresses(machine, file, places[1], mask)
    for buffer, threads, offset in machine.global_index(addresses, 16, mask):
        data[threads] = buffer.data[offset[:, None] + np.arange(16)]
    machine.shared_known[machine.block_of[mask][:, None], at[mask][:, None] + np.arange(16)] = False
    copies, groups = _copies(machine)
    copies.append((mask.copy(), groups.copy(), at.copy(), data))


def _end_group(machine: Machine, _file: File, _statement: Statement, mask: Mask) -> None:
    """LDGDEPBAR: the copies so far are a group."""
    _copies(machine)[1][mask] += 1


def _wait_for_copies(machine: Machine, _file: File, statement: Statement, mask: Mask) -> None:
    """DEPBAR.LE SB0, n: all groups but the last n are there."""
    left = int(statement.instruction.operands[-1].values[0])
    copies, groups = _copies(machine)
    under_way = []
    for of, group, at, data in copies:
        done = of & mask & (group < groups - left)
        place = machine.block_of[done][:, None], at[done][:, None] + np.arange(16)
        machine.shared[place] = data[done]
        machine.shared_known[place] = True
        if (of & ~done).any():
            under_way.append((of & ~done, group, at, data))
    copies[:] = under_way


def _copies(machine: Machine) -> tuple[list[Any], NDArray[np.int64]]:
    """Copies under way (threads, group, to, what), and the group each thread fills."""
    made: tuple[list[Any], NDArray[np.int64]] = machine.__dict__.setdefault(
        "copies", ([], np.zeros(machine.count, np.int64))
    )
    return made


def _nothing(_machine: Machine, _file: File, _statement: Statement, _mask: Mask) -> None:
    pass  # the kernel in front has ended


_OPERATIONS = {
    "VOTE": _vote,
    "VOTEU": _vote,
    "VIADDMNMX": _add_then_least,
    "REDG": _atomic_add,
    "ATOMG": _atomic_add,
    "MUFU": _special_function,
    "HMUL2": _multiply_pairs,
    "LDGSTS": _start_copy,
    "LDGDEPBAR": _end_group,
    "DEPBAR": _wait_for_copies,
    "ACQBULK": _nothing,
    "PREEXIT": _nothing,
}
