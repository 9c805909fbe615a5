"""The ring of a pool: two halves, one being filled while the experts of the other compute."""

from typing import NamedTuple

from torch import Tensor

from moet_vllm.residency.copies import Moment
from moet_vllm.residency.pool import SlotPool

__all__ = ["Chunk", "Ring"]


class Chunk(NamedTuple):
    """Rows of a layer in one half of the ring.

    Attributes:
        layer: Number of the layer.
        experts: Whose rows.
        table: int32 [E], their slots and -1 for all others.
        half: Which half.
        filled: When the rows are there.
    """

    layer: int
    experts: list[int]
    table: Tensor
    half: int
    filled: Moment


class Ring:
    """Hands out the halves in turns.

    The host never waits here: copies into a half wait on their stream for what last computed with
    it, and what computes waits on its own for the copies.

    Attributes:
        size: Rows of a half.
    """

    def __init__(self, pool: SlotPool) -> None:
        self.size = max(1, pool.ring // 2)
        self._pool = pool
        self._half = 0
        self._read: list[Moment | None] = [None, None]

    def next_half(self) -> int:
        """Return the half to fill now."""
        self._half = 1 - self._half
        read = self._read[self._half]
        if read is not None:
            self._pool.copies.hold_for(read)
        return self._half

    def first_slot(self, half: int) -> int:
        """Return the first slot of a half."""
        return self._pool.slots + half * self.size

    def await_rows(self, chunk: Chunk) -> None:
        """Let what computes from now on wait for a chunk's rows."""
        chunk.filled.hold(self._pool.copies.computing())

    def was_read(self, chunk: Chunk) -> None:
        """Note that everything that reads a chunk is queued."""
        self._read[chunk.half] = self._pool.copies.now()
