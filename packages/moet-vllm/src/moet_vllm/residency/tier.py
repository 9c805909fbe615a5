"""One codec's experts on a device: slots of rows over a store of all of them.

A tier moves rows and keeps its tables true; when to run what is the business of `resident`.
"""

from collections.abc import Callable, Container, Iterable, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from moet_core.errors import MoetError
from moet_core.residency import Key, Move, PoolPolicy, WorkingSetError, worst_case
from moet_core.row import RowLayout
from moet_kernels import experts
from moet_vllm.residency.copies import Moment
from moet_vllm.residency.pool import SlotPool
from moet_vllm.residency.ring import Chunk, Ring
from moet_vllm.residency.stores import HostStore

__all__ = ["PROMOTIONS", "PoolShape", "Tier"]

PROMOTIONS = 8
"""Rows that may be on their way into a tier between two steps."""


class PoolShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one rank's pool.

    Attributes:
        layers: Model indices of this rank's layers with routed experts, ascending.
        experts: Routed experts of a layer.
        top_k: Experts a token is routed to.
        row: Layout of one expert's row.
        slots: Slots of the working set.
        ring: Slots for rows that a streamed step uses once; even, and 0 if every expert has a slot.
    """

    layers: tuple[int, ...]
    experts: int
    top_k: int
    row: RowLayout
    slots: int
    ring: int

    @property
    def all_experts(self) -> int:
        """Experts of all layers."""
        return len(self.layers) * self.experts

    @property
    def coverage(self) -> float:
        """Share of the experts that have a slot."""
        return self.slots / self.all_experts

    def working_set(self, tokens: int) -> int:
        """Return the most experts that a step of so many tokens can want."""
        return worst_case(len(self.layers), self.experts, self.top_k, tokens)


class Tier:
    """Slots, their policy and the store behind them; layers count from 0.

    Args:
        shape: Sizes of the pool.
        store: Where rows come from.
        device: Where the pool lies.
        recorded: See `SlotPool`.

    Attributes:
        brought: Rows copied to the device while a step waited.
        promoted: Rows copied to the device between steps.
    """

    def __init__(
        self, shape: PoolShape, store: HostStore, device: torch.device, recorded: int = 0
    ) -> None:
        self.shape = shape
        self.store = store
        self._device = device
        self._recorded = recorded
        self.brought = self.promoted = 0
        self._make_pool(shape)

    @property
    def is_full(self) -> bool:
        """Whether every expert is present, for good: what is never absent is never evicted."""
        return self.policy.resident == self.shape.all_experts

    def begin_step(self, agree: Callable[[int], int] | None = None) -> None:
        """End the former step and publish what was promoted since.

        Args:
            agree: Have all ranks publish the same promotions, or none: returns the largest of the
                numbers that they pass.
        """
        self.store.begin_step()
        if self._promoting:
            self._copy_promotions()
            self._finish_promotions(agree)
        self.policy.begin_step()

    def bring(self, keys: Sequence[Key]) -> int:
        """Read experts into slots and make them present; return how many rows were copied.

        Raises:
            WorkingSetError: They do not fit beside what this step wants.
            PackError: A row could not be read; none of them became present.
        """
        # A promotion under way has a slot already; whoever waits for its row finishes it.
        waiting = [self._promoting.pop(key) for key in keys if key in self._promoting]
        there = {move.key for move in waiting if self._copying.pop(move.key, None) is not None}
        try:
            try:
                moves = self.policy.plan(keys)
            except WorkingSetError:
                # Copies that are under way end before those that get their slots begin.
                self.policy.abandon(list(self._promoting.values()))
                self._promoting.clear()
                self._copying.clear()
                moves = self.policy.plan(keys)
        except BaseException:
            self.policy.abandon(waiting)
            raise
        self._fill(moves + waiting, there)
        self.brought += len(moves) + len(waiting)
        return len(moves) + len(waiting)

    def preload(self, keys: Iterable[Key]) -> None:
        """Fill free slots before serving, the first keys first.

        Args:
            keys: (model layer, expert), hottest first.

        Raises:
            PackError: A row could not be read.
        """
        number = {layer: index for index, layer in enumerate(self.shape.layers)}
        self._fill(self.policy.preload([(number[layer], expert) for layer, expert in keys]))

    def promote(self) -> None:
        """Start to bring what is worth more than what the slots hold; nobody waits for it."""
        room = PROMOTIONS - len(self._promoting)
        moves = self.policy.promotions(room) if room > 0 else []
        if not moves:
            return
        self._promoting.update({move.key: move for move in moves})
        if any(move.evicted is not None for move in moves):
            # Evicted experts are absent from now on, for the next pass too.
            self.pool.set_table(self.policy.slot_of)
        self.store.read_ahead(self.model_key(move.key) for move in moves)
        self._copy_promotions()

    def absent(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Return those of a layer's experts that have no row in a slot."""
        slot_of = self.policy.slot_of[layer]
        return [expert for expert in experts if slot_of[expert] < 0]

    def read_ahead(self, layer: int, experts: Iterable[int]) -> None:
        """Start to read rows of a layer that will be used once."""
        self.store.read_ahead((self.shape.layers[layer], expert) for expert in experts)

    def start_chunk(self, layer: int, experts: Sequence[int]) -> Chunk:
        """Read experts of a layer and start to copy them into the ring; waits for reads alone.

        Raises:
            PackError: A row could not be read.
        """
        half = self.ring.next_half()
        first = self.ring.first_slot(half)
        slots = {(self.shape.layers[layer], e): first + i for i, e in enumerate(experts)}
        self.store.bring(list(slots), lambda key, row: self.pool.place(slots[key], row), scan=True)
        self.brought += len(experts)
        numbers = np.arange(first, first + len(experts), dtype=np.int32)
        table = self.pool.table(list(experts), numbers)
        return Chunk(layer, list(experts), table, half, self.pool.copies.mark())

    def start_ready_chunk(self, layer: int, experts: Sequence[int]) -> Chunk | None:
        """Start to copy those of a layer's experts that are in memory, and to read the others.

        Raises:
            PackError: A row was lost while it was handed out.
        """
        self.read_ahead(layer, experts)
        states = self.store.states([(self.shape.layers[layer], e) for e in experts])
        ready = [e for e, state in zip(experts, states, strict=True) if state == "ready"]
        return self.start_chunk(layer, ready) if ready else None

    def add_chunk(
        self, parts: Tensor, x: Tensor, topk_ids: Tensor, chunk: Chunk, limit: float | None
    ) -> None:
        """Compute a chunk's experts once its rows are there; the host does not wait."""
        self.ring.await_rows(chunk)
        self.add(parts, x, topk_ids, chunk.table, limit)
        self.ring.was_read(chunk)

    def add(
        self, parts: Tensor, x: Tensor, topk_ids: Tensor, table: Tensor, limit: float | None
    ) -> None:
        """Compute the experts that a table names; see `moet_kernels.experts.add_parts`."""
        row = self.shape.row
        experts.add_parts(
            parts,
            x,
            topk_ids,
            self.pool.rows,
            table,
            hidden=row.hidden,
            intermediate=row.intermediate,
            codec=row.codec,
            swiglu_limit=limit,
        )

    def of_layer(self, layer: int) -> experts.Tier:
        """Return a layer's experts as `moet_kernels.experts` takes them."""
        return experts.Tier(self.pool.rows, self.pool.slot_of[layer], self.shape.row)

    def resize(self, shape: PoolShape) -> None:
        """Replace the pool by an empty one of another size; no step has run over it."""
        del self.pool, self.ring, self.policy
        self._make_pool(shape)

    def hottest(self) -> list[Key]:
        """Return the resident experts as (model layer, expert), the most valuable first."""
        return [self.model_key(key) for key in self.policy.hottest()]

    def model_key(self, key: Key) -> Key:
        """Return a key with the model's index of the layer."""
        return self.shape.layers[key[0]], key[1]

    def check_integrity(self) -> None:
        """Check the tables, and that every resident slot holds the store's bytes.

        Raises:
            PoolError: The policy's tables disagree.
            MoetError: A slot or the device's table differs; it names layer and expert.
        """
        self.policy.check_integrity()
        if not (self.pool.slot_of.cpu().numpy() == self.policy.slot_of).all():
            raise MoetError(
                "Expert pool: wanted the policy's slot table on the device, found another."
            )
        for key in self.policy.hottest():
            slot = int(self.policy.slot_of[key])
            layer, expert = self.model_key(key)
            if not self.store.matches((layer, expert), self.pool.row(slot)):
                raise MoetError(
                    f"Expert pool: wanted expert {expert} of layer {layer} in slot {slot}, found "
                    "other bytes. The memory is damaged, or something wrote into the pool."
                )

    def close(self) -> None:
        """Release the store, once nothing is copied out of it any more."""
        self.pool.copies.wait()
        self.store.close()

    def _make_pool(self, shape: PoolShape) -> None:
        self.shape = shape
        size = {"layers": len(shape.layers), "experts": shape.experts, "slots": shape.slots}
        self.policy = PoolPolicy(**size)
        self.pool = SlotPool(
            **size,
            ring=shape.ring,
            row_bytes=shape.row.row_bytes,
            device=self._device,
            recorded=self._recorded,
            top_k=shape.top_k,
        )
        self.ring = Ring(self.pool)
        self.store.attach(self.pool.copies)
        self._promoting: dict[Key, Move] = {}
        self._copying: dict[Key, Moment] = {}  # promotions whose rows are on their last way

    def _fill(self, moves: list[Move], there: Container[Key] = ()) -> None:
        """Read rows into their slots and make them present; all or nothing.

        Args:
            moves: Which rows, and whereto.
            there: Keys whose copies were started before.
        """
        slots = {self.model_key(m.key): m.slot for m in moves if m.key not in there}
        self.pool.open_slots()
        try:
            self.store.bring(
                list(slots), lambda key, row: self.pool.place(slots[key], row), scan=False
            )
        except BaseException:
            self.policy.abandon(moves)
            self.pool.set_table(self.policy.slot_of)
            raise
        finally:
            self.pool.copies.wait()
        self.policy.publish(moves)
        self.pool.set_table(self.policy.slot_of)

    def _copy_promotions(self) -> None:
        """Start to copy the promoted rows that have been read."""
        waiting = [key for key in self._promoting if key not in self._copying]
        states = self.store.states([self.model_key(key) for key in waiting])
        ready = [key for key, state in zip(waiting, states, strict=True) if state == "ready"]
        if not ready:
            return
        slots = {self.model_key(key): self._promoting[key].slot for key in ready}
        self.pool.open_slots()
        self.store.bring(list(slots), lambda key, row: self.pool.place(slots[key], row), scan=False)
        self._copying.update(dict.fromkeys(ready, self.pool.copies.mark()))

    def _finish_promotions(self, agree: Callable[[int], int] | None) -> None:
        """Publish the promotions whose rows have arrived, and give up those that were dropped."""
        waiting = [key for key in self._promoting if key not in self._copying]
        states = self.store.states([self.model_key(key) for key in waiting])
        dropped = [key for key, state in zip(waiting, states, strict=True) if state == "absent"]
        there = [key for key, moment in self._copying.items() if moment.has_passed]
        if agree is not None:
            slowest = agree(2 if dropped else 1 if len(there) < len(self._promoting) else 0)
            every = list(self._promoting)
            there, dropped = (every if slowest == 0 else []), (every if slowest == 2 else [])
        self.policy.abandon([self._promoting.pop(key) for key in dropped])
        ready = [self._promoting.pop(key) for key in there]
        for key in [*dropped, *there]:
            self._copying.pop(key, None)
        if ready:
            self.policy.publish(ready)
            self.pool.set_table(self.policy.slot_of)
            self.promoted += len(ready)
