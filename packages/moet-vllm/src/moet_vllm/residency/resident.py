"""Runs steps over a pool that holds a part of the experts, with the bits of one that holds all.

A step runs; the experts that it was routed to and that were absent contributed zero; they are
fetched and the step runs again, until nothing was absent. Routing becomes final layer by layer, so
that layers + 1 passes suffice. A step that may want more experts than the pool has slots is
streamed instead: each layer fetches what it needs before it computes.

The step loop owns all state here; no other thread touches it.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from moet_core.errors import MoetError
from moet_core.residency import Key, Move, PoolPolicy, WorkingSetError, worst_case
from moet_core.row import RowLayout
from moet_kernels.experts import add_parts, combine_parts, experts
from moet_store import PackError
from moet_vllm.residency.counts import Counts
from moet_vllm.residency.pool import SlotPool
from moet_vllm.residency.stores import HostStore

__all__ = ["PoolShape", "ResidentExperts"]

T = TypeVar("T")

STREAM = 2**40
"""What a rank reports if its pool cannot be repaired for this step; above any number of misses."""

FAIL = 2**41
"""What a rank reports if one of its rows cannot be read."""

PROMOTIONS = 8
"""Rows that may be on their way into the pool between two steps."""


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


class ResidentExperts:
    """The routed experts of one rank.

    Args:
        shape: Sizes of the pool.
        store: Where absent rows come from.
        device: Where the pool lies.
        agree: Returns the largest of the numbers that the ranks of a tensor-parallel group pass;
            None for a group of one.
        tolerance: Experts that a step may lack at most and still count (approximate mode).

    Attributes:
        failure: Why the last step has no result; None if it has one.
        lacking: Experts that the last step's result lacks; above 0 only in approximate mode.
    """

    def __init__(
        self,
        shape: PoolShape,
        store: HostStore,
        device: torch.device,
        agree: Callable[[int], int] | None = None,
        tolerance: int = 0,
    ) -> None:
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
        self.counts = Counts(row_bytes=shape.row.row_bytes)
        self.tolerance = tolerance
        self.failure: MoetError | None = None
        self.lacking = 0
        self._agree = agree or (lambda value: value)
        self._streaming = self._prompt = False
        self._promoting: dict[Key, Move] = {}

    @property
    def is_streaming(self) -> bool:
        """Whether the pass that runs now, or is about to, fetches layer by layer."""
        return self._streaming

    def step(
        self,
        run: Callable[[], T],
        tokens: int,
        restore: Callable[[], object],
        *,
        prompt: bool = False,
    ) -> T:
        """Run one step and return what its last pass returned.

        Args:
            run: Runs one forward pass; it must be repeatable once `restore` was called.
            tokens: Tokens of the pass, padding included.
            restore: Puts the pass's inputs back as they were.
            prompt: The step reads prompts: what it wants says little of what decoding will want.

        Returns:
            The result, which counts only if `failure` is None afterwards.
        """
        self._begin()
        self._prompt = prompt
        if self.shape.working_set(tokens) > self.shape.slots:
            output = self._stream_step(run)
        else:
            output = self._repair_step(run, restore)
        self.counts.failed += self.failure is not None
        self._promote()
        return output

    def run_layer(
        self, layer: int, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, limit: float | None
    ) -> Tensor:
        """Run the routed experts of one layer inside a pass.

        Args:
            layer: Number of the layer on this rank, from 0.
            x: bfloat16 or float32 [T, H].
            topk_weights: float32 [T, k].
            topk_ids: integer [T, k].
            limit: SwiGLU limit or None.

        Returns:
            [T, H] in x's dtype.
        """
        if self._streaming:
            return self._stream_layer(layer, x, topk_weights, topk_ids, limit)
        row = self.shape.row
        return experts(
            x,
            topk_weights,
            topk_ids,
            self.pool.rows,
            self.pool.slot_of[layer],
            hidden=row.hidden,
            intermediate=row.intermediate,
            codec=row.codec,
            swiglu_limit=limit,
            wanted=self.pool.wanted[layer],
        )

    def preload(self, keys: Sequence[Key]) -> None:
        """Fill free slots before serving, the first keys first.

        Args:
            keys: (model layer, expert), hottest first.

        Raises:
            PackError: A row could not be read.
        """
        number = {layer: index for index, layer in enumerate(self.shape.layers)}
        moves = self.policy.preload([(number[layer], expert) for layer, expert in keys])
        self._fill(moves)

    def hottest(self) -> list[Key]:
        """Return the resident experts as (model layer, expert), the most valuable first."""
        return [self._model_key(key) for key in self.policy.hottest()]

    def check_integrity(self) -> None:
        """Check the tables, and that every resident slot holds the store's bytes.

        Raises:
            PoolError: The policy's tables disagree.
            MoetError: A slot or the device's table differs; it names layer and expert.
        """
        self.policy.check_integrity()
        table = self.pool.slot_of.cpu().numpy()
        if not (table == self.policy.slot_of).all():
            raise MoetError(
                "Expert pool: wanted the policy's slot table on the device, found another."
            )
        for key in self.policy.hottest():
            slot = int(self.policy.slot_of[key])
            if not self.store.matches(self._model_key(key), self.pool.row(slot)):
                layer, expert = self._model_key(key)
                raise MoetError(
                    f"Expert pool: wanted expert {expert} of layer {layer} in slot {slot}, found "
                    "other bytes. The memory is damaged, or something wrote into the pool."
                )

    def close(self) -> None:
        """Release the store."""
        self.store.close()

    def _begin(self) -> None:
        self.failure = None
        self.lacking = 0
        self.counts.steps += 1
        self.pool.open_slots()
        self.store.begin_step()
        self._finish_promotions()
        self.policy.begin_step()
        self.pool.wanted.zero_()

    def _repair_step(self, run: Callable[[], T], restore: Callable[[], object]) -> T:
        for number in range(len(self.shape.layers) + 2):
            if number:
                restore()
            self.counts.passes += 1
            output = run()
            marks = self.pool.take_wanted()
            missing = self.policy.want(marks)
            if not number:
                self.counts.wanted += int(marks.sum())
                self.counts.missed += len(missing)
            report = self._agree(self._repair(missing))
            if report >= FAIL:
                self.failure = self.failure or MoetError("Another rank could not read an expert.")
                return output
            if report >= STREAM:
                restore()
                return self._stream_step(run, counted=True)
            if report <= self.tolerance:
                self.lacking = report
                self.counts.degraded += report > 0
                self.counts.repaired += number > 0
                return output
        raise MoetError(
            f"A step still misses experts after {number + 1} passes over {number - 1} layers. "
            "Each pass makes one more layer's routing final, so the passes differ: is there a "
            "model state that a pass changes? Serve without a pool, and please report it."
        )

    def _repair(self, missing: list[Key]) -> int:
        """Fetch what a pass missed; return how many, or STREAM or FAIL."""
        if not missing:
            return 0
        if len(missing) <= self.tolerance:
            return len(missing)
        try:
            self._bring(missing)
        except PackError as error:
            self.failure = error
            return FAIL
        except WorkingSetError:
            return STREAM
        return len(missing)

    def _bring(self, keys: list[Key]) -> None:
        started = time.perf_counter()
        # A promotion under way has a slot already; whoever waits for its row finishes it.
        waiting = [self._promoting.pop(key) for key in keys if key in self._promoting]
        try:
            try:
                moves = self.policy.plan(keys)
            except WorkingSetError:
                self._drop_promotions()
                moves = self.policy.plan(keys)
        except BaseException:
            self.policy.abandon(waiting)
            raise
        self._fill(moves + waiting)
        self.counts.brought += len(moves) + len(waiting)
        self.counts.stall_seconds += time.perf_counter() - started

    def _fill(self, moves: list[Move]) -> None:
        """Read rows into their slots and make them present; all or nothing."""
        slots = {self._model_key(move.key): move.slot for move in moves}
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

    def _stream_step(self, run: Callable[[], T], *, counted: bool = False) -> T:
        """Run a step layer by layer; `counted` says that what it wants was counted before."""
        self.counts.streamed += 1
        self.counts.passes += 1
        before = self.counts.wanted, self.counts.missed
        self._streaming = True
        try:
            output = run()
        finally:
            self._streaming = False
        if counted:
            self.counts.wanted, self.counts.missed = before
        self.policy.note(self.pool.take_wanted(), prompt=self._prompt)
        if self._agree(FAIL if self.failure else 0):
            self.failure = self.failure or MoetError("Another rank could not read an expert.")
        return output

    def _stream_layer(
        self, layer: int, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, limit: float | None
    ) -> Tensor:
        routed = topk_ids.unique().tolist()
        self.pool.wanted[layer, routed] = 1
        slot_of = self.policy.slot_of[layer]
        absent = [expert for expert in routed if slot_of[expert] < 0]
        self.counts.wanted += len(routed)
        self.counts.missed += len(absent)
        parts = x.new_zeros(topk_ids.numel(), x.shape[1], dtype=torch.float32)
        half = max(1, self.pool.ring // 2)
        chunks = [absent[at : at + half] for at in range(0, len(absent), half)]
        if chunks:
            self._read_ahead(layer, chunks[0])
        self._add(parts, x, topk_ids, self.pool.slot_of[layer], limit)
        for number, chunk in enumerate(chunks):
            table = self._bring_chunk(layer, chunk, self.pool.slots + number % 2 * half)
            if number + 1 < len(chunks):
                self._read_ahead(layer, chunks[number + 1])
            elif layer + 1 < len(self.shape.layers):
                self._read_ahead_of_next(layer + 1, len(routed), half)
            self._add(parts, x, topk_ids, table, limit)
        return combine_parts(parts, topk_weights, x.dtype)

    def _bring_chunk(self, layer: int, chunk: list[int], first_slot: int) -> Tensor:
        """Read experts of a layer into the ring; return the slot table of them alone."""
        table = torch.full_like(self.pool.slot_of[layer], -1)
        if self.failure is not None:
            return table  # the step has no result any more; it only has to end
        started = time.perf_counter()
        keys = {(self.shape.layers[layer], e): first_slot + i for i, e in enumerate(chunk)}
        # The pass before the last may still read this half of the ring.
        self.pool.open_slots()
        try:
            self.store.bring(
                list(keys),
                lambda key, row: self.pool.place(keys[key], row),
                self.pool.settle,
                scan=True,
            )
        except PackError as error:
            self.failure = error
        self.pool.settle()
        if self.failure is None:
            slots = torch.tensor(list(keys.values()), dtype=torch.int32, device=table.device)
            table[chunk] = slots
            self.counts.brought += len(chunk)
        self.counts.stall_seconds += time.perf_counter() - started
        return table

    def _add(
        self, parts: Tensor, x: Tensor, topk_ids: Tensor, table: Tensor, limit: float | None
    ) -> None:
        row = self.shape.row
        add_parts(
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

    def _read_ahead(self, layer: int, experts_: list[int]) -> None:
        if self.failure is None:
            self.store.read_ahead((self.shape.layers[layer], expert) for expert in experts_)

    def _read_ahead_of_next(self, layer: int, routed: int, count: int) -> None:
        """Guess the next layer's first chunk where a layer is routed to most of its experts."""
        if 2 * routed >= self.shape.experts:
            slot_of = self.policy.slot_of[layer]
            absent = [e for e in range(self.shape.experts) if slot_of[e] < 0]
            self._read_ahead(layer, absent[:count])

    def _promote(self) -> None:
        """Start to bring what recent steps wanted into the pool; nobody waits for it."""
        if self.failure is not None:
            return
        room = PROMOTIONS - len(self._promoting)
        for move in self.policy.promotions(room) if room > 0 else []:
            self._promoting[move.key] = move
        if self._promoting:
            # Evicted experts are absent from now on, for the next pass too.
            self.pool.set_table(self.policy.slot_of)
            self.store.read_ahead(self._model_key(key) for key in self._promoting)

    def _finish_promotions(self) -> None:
        """Publish the promotions whose rows have arrived, and give up those that were dropped."""
        states = {key: self.store.state(self._model_key(key)) for key in self._promoting}
        ready = [self._promoting.pop(key) for key, state in states.items() if state == "ready"]
        dropped = [self._promoting.pop(key) for key, state in states.items() if state == "absent"]
        self.policy.abandon(dropped)
        if ready:
            self._fill(ready)
            self.counts.promoted += len(ready)

    def _drop_promotions(self) -> None:
        self.policy.abandon(list(self._promoting.values()))
        self._promoting.clear()

    def _model_key(self, key: Key) -> Key:
        return self.shape.layers[key[0]], key[1]
