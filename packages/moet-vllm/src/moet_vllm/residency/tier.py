"""One codec's experts on a device: slots of rows over a store of all of them.

A tier moves rows and keeps its tables true; when to run what is the business of `resident`.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec
import torch
from torch import Tensor

from moet_core.errors import MoetError
from moet_core.residency import Key, Move, PoolPolicy, WorkingSetError, worst_case
from moet_core.row import RowLayout
from moet_kernels import experts
from moet_vllm.residency.pool import SlotPool
from moet_vllm.residency.stores import HostStore, RowState

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

    Attributes:
        brought: Rows copied to the device while a step waited.
        promoted: Rows copied to the device between steps.
    """

    def __init__(self, shape: PoolShape, store: HostStore, device: torch.device) -> None:
        self.shape = shape
        self.store = store
        self.policy = PoolPolicy(layers=len(shape.layers), experts=shape.experts, slots=shape.slots)
        self.pool = SlotPool(
            slots=shape.slots,
            ring=shape.ring,
            row_bytes=shape.row.row_bytes,
            layers=len(shape.layers),
            experts=shape.experts,
            device=device,
        )
        self.brought = self.promoted = 0
        self._promoting: dict[Key, Move] = {}

    def begin_step(self, agree: Callable[[int], int] | None = None) -> None:
        """End the former step and publish what was promoted since.

        Args:
            agree: Have all ranks publish the same promotions, or none: returns the largest of the
                numbers that they pass.
        """
        self.pool.open_slots()
        self.store.begin_step()
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
        try:
            try:
                moves = self.policy.plan(keys)
            except WorkingSetError:
                self.policy.abandon(list(self._promoting.values()))
                self._promoting.clear()
                moves = self.policy.plan(keys)
        except BaseException:
            self.policy.abandon(waiting)
            raise
        self._fill(moves + waiting)
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
        for move in self.policy.promotions(room) if room > 0 else []:
            self._promoting[move.key] = move
        if self._promoting:
            # Evicted experts are absent from now on, for the next pass too.
            self.pool.set_table(self.policy.slot_of)
            self.store.read_ahead(self.model_key(key) for key in self._promoting)

    def absent(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Return those of a layer's experts that have no row in a slot."""
        slot_of = self.policy.slot_of[layer]
        return [expert for expert in experts if slot_of[expert] < 0]

    def read_ahead(self, layer: int, experts: Iterable[int]) -> None:
        """Start to read rows of a layer that will be used once."""
        self.store.read_ahead((self.shape.layers[layer], expert) for expert in experts)

    def bring_chunk(self, layer: int, experts: Sequence[int], first_slot: int) -> Tensor:
        """Read experts of a layer into the ring; return the slot table of them alone, int32 [E].

        Raises:
            PackError: A row could not be read.
        """
        keys = {(self.shape.layers[layer], e): first_slot + i for i, e in enumerate(experts)}
        # The pass before the last may still read this half of the ring.
        self.pool.open_slots()
        try:
            self.store.bring(
                list(keys),
                lambda key, row: self.pool.place(keys[key], row),
                self.pool.settle,
                scan=True,
            )
        finally:
            self.pool.settle()
        table = torch.full_like(self.pool.slot_of[layer], -1)
        slots = torch.tensor(list(keys.values()), dtype=torch.int32, device=table.device)
        table[list(experts)] = slots
        self.brought += len(experts)
        return table

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
        """Release the store."""
        self.store.close()

    def _fill(self, moves: list[Move]) -> None:
        """Read rows into their slots and make them present; all or nothing."""
        slots = {self.model_key(move.key): move.slot for move in moves}
        # Whatever is evicted must not be looked up while its slot is overwritten.
        self.pool.set_table(self.policy.slot_of)
        try:
            self.store.bring(
                list(slots),
                lambda key, row: self.pool.place(slots[key], row),
                self.pool.settle,
                scan=False,
            )
        except BaseException:
            self.pool.settle()
            self.policy.abandon(moves)
            raise
        self.pool.settle()
        self.policy.publish(moves)
        self.pool.set_table(self.policy.slot_of)

    def _finish_promotions(self, agree: Callable[[int], int] | None) -> None:
        """Publish the promotions whose rows have arrived, and give up those that were dropped."""
        if not self._promoting:
            return
        states = {key: self.store.state(self.model_key(key)) for key in self._promoting}
        if agree is not None:
            order: tuple[RowState, ...] = ("ready", "coming", "absent")
            slowest = order[agree(max(order.index(state) for state in states.values()))]
            states = dict.fromkeys(states, slowest)
        ready = [self._promoting.pop(key) for key, state in states.items() if state == "ready"]
        dropped = [self._promoting.pop(key) for key, state in states.items() if state == "absent"]
        self.policy.abandon(dropped)
        if ready:
            self._fill(ready)
            self.promoted += len(ready)
