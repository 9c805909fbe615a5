"""Runs steps over pools that hold a part of the experts.

A step runs; the experts that it was routed to and that were absent contributed zero; they are
fetched and the step runs again, until nothing was absent. Routing becomes final layer by layer, so
that layers + 1 passes suffice. A step that may want more experts than the pool has slots is
streamed instead: each layer fetches what it needs before it computes. Either way the result has
the bits of a pool that holds all experts.

A second, fine tier may hold experts at the checkpoint's precision. An expert that is in both
counts as fine. The gate decides which steps run again with all their experts fine.

The step loop owns all state here; no other thread touches it.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet_core.errors import MoetError
from moet_core.gate import Gate, Reading
from moet_core.residency import Key, PoolPolicy, WorkingSetError
from moet_kernels.experts import experts
from moet_store import PackError
from moet_vllm.residency.counts import Counts
from moet_vllm.residency.padding import Padding
from moet_vllm.residency.pool import SlotPool
from moet_vllm.residency.stores import HostStore
from moet_vllm.residency.stream import LayerStream, measured_layer
from moet_vllm.residency.tier import PoolShape, Tier

__all__ = ["FineTier", "PoolShape", "ResidentExperts"]

T = TypeVar("T")

STREAM = 2**40
"""What a rank reports if its pool cannot be repaired for this step; above any number of misses."""

FAIL = 2**41
"""What a rank reports if one of its rows cannot be read."""

LIKELY = 0.9
"""Share of the slots that a step may be expected to want; more than that is streamed at once."""

RECORDED = 512
"""Rows at most of a pass whose routing is recorded row by row; by default, no graph has more."""

OTHER_RANK = "Another rank could not read an expert."


class FineTier:
    """The fine tier and how it is used.

    Steps between the two ends of the gate, and all steps of a tier by use, take an expert at the
    precision at which it happens to be there: better than the base, and not reproducible. A gate
    that always fires, or never, is exact.

    Args:
        tier: Rows of the fine codec.
        gate: Decides which steps run again; None for no gate.
        prompts: Steps that read prompts run with fine experts alone.
        by_use: Experts are promoted between steps by how much they are used. Otherwise only the
            gate brings them.
    """

    def __init__(
        self, tier: Tier, *, gate: Gate | None = None, prompts: bool = True, by_use: bool = False
    ) -> None:
        self.tier = tier
        self.gate = gate
        self.prompts = prompts
        self.by_use = by_use


class ResidentExperts:
    """The routed experts of one rank.

    Args:
        shape: Sizes of the base tier's pool.
        store: Where its absent rows come from.
        device: Where the pool lies.
        agree: Returns the largest of the numbers that the ranks of a tensor-parallel group pass;
            None for a group of one.
        tolerance: Experts that a step may lack at most and still count (approximate mode).
        fine: The fine tier, if there is one.
        padded: Rows at most of a pass that may end in padding, as a captured CUDA graph's does;
            0 if none does. It needs kernels that accept -1 for no expert.

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
        fine: FineTier | None = None,
        padded: int = 0,
    ) -> None:
        self.base = Tier(shape, store, device, min(padded, RECORDED))
        self.fine = fine
        self.counts = Counts(row_bytes=shape.row.row_bytes)
        self.tolerance = tolerance
        self.failure: MoetError | None = None
        self.lacking = 0
        self._agree = agree or (lambda value: value)
        self._stream: LayerStream | None = None
        self._prompt = False
        self._tokens = 0
        self._never_misses = False
        self._last_decode: tuple[int, int] | None = None
        self._taken: NDArray[np.bool_] | None = None
        self._may_look = False
        self._seen = np.zeros((len(shape.layers), shape.experts), bool)
        self._padding = Padding(padded, device) if padded else None
        self._measures = False

    @property
    def _marks(self) -> bool:
        """Whether anybody looks at what passes are routed to."""
        return not self._never_misses or self.fine is not None

    @property
    def _wanted(self) -> NDArray[np.bool_]:
        """What the last pass was routed to, bool [L, E]; the first look waits for the pass."""
        if self._taken is None:
            looks = self._may_look and self.store.reads
            self._taken = self.pool.take_wanted(self._look if looks else None)
        return self._taken

    @property
    def shape(self) -> PoolShape:
        """Sizes of the base tier."""
        return self.base.shape

    @property
    def store(self) -> HostStore:
        """Store of the base tier."""
        return self.base.store

    @property
    def policy(self) -> PoolPolicy:
        """Policy of the base tier."""
        return self.base.policy

    @property
    def pool(self) -> SlotPool:
        """Slots of the base tier; its marks are those of all tiers."""
        return self.base.pool

    @property
    def tiers(self) -> list[Tier]:
        """The base tier, and the fine one if there is one."""
        return [self.base] if self.fine is None else [self.base, self.fine.tier]

    @property
    def device_bytes(self) -> int:
        """Memory of the device that the tiers' pools hold."""
        return sum(tier.pool.device_bytes for tier in self.tiers)

    @property
    def is_streaming(self) -> bool:
        """Whether the pass that runs now, or is about to, fetches layer by layer."""
        return self._stream is not None

    def step(
        self,
        run: Callable[[], T],
        tokens: int,
        restore: Callable[[], object],
        *,
        prompt: bool = False,
        read: Callable[[T], Reading | None] | None = None,
        certain: Callable[[], Iterable[Key]] | None = None,
    ) -> T:
        """Run one step and return what its last pass returned.

        Args:
            run: Runs one forward pass; it must be repeatable once `restore` was called.
            tokens: Tokens of the pass, without padding.
            restore: Puts the pass's inputs back as they were.
            prompt: The step reads prompts: what it wants says little of what decoding will want.
            read: Reads the logits of the rows that will be sampled, for the gate; returns None on
                ranks that have none.
            certain: Returns experts, with layers counted from 0, that the step will want whatever
                its activations are.

        Returns:
            The result, which counts only if `failure` is None afterwards.
        """
        self._begin()
        self._prompt = prompt
        self._tokens = tokens
        if self._padding is not None:
            self._padding.begin(tokens)
        fine = self.fine
        if fine is not None and prompt and fine.prompts:
            output = self._stream_step(run, "stream fine")
        elif self._may_fit(tokens):
            if certain is not None and not self._never_misses:
                self._bring_certain(certain())
            output = self._repair_step(run, restore)
        else:
            output = self._stream_step(run, "stream")
        if fine is not None and fine.gate is not None and read is not None and not prompt:
            output = self._gate_step(fine, fine.gate, output, run, restore, read)
        self.counts.failed += self.failure is not None
        self.counts.degraded += self.failure is None and self.lacking > 0
        self._end(tokens)
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
        records = self._stream is None and len(x) <= self.pool.recorded
        if self._padding is not None and self._marks and not records:
            topk_ids = self._padding.without(topk_ids)
        if self._measures and self.shape.working_set(len(x)) > self.shape.slots:
            return measured_layer(self.tiers, layer, x, topk_weights, topk_ids, limit)
        if self._stream is not None:
            return self._stream.run_layer(layer, x, topk_weights, topk_ids, limit)
        row = self.shape.row
        fine = self.fine.tier if self.fine is not None else None
        output = experts(
            x,
            topk_weights,
            topk_ids,
            self.pool.rows,
            self.pool.slot_of[layer],
            hidden=row.hidden,
            intermediate=row.intermediate,
            codec=row.codec,
            swiglu_limit=limit,
            wanted=self.pool.wanted[layer] if self._marks and not records else None,
            fine=None if fine is None else fine.of_layer(layer),
        )
        if records and self._marks:
            self.pool.record(layer, topk_ids)
        return output

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Let passes inside the block use the device's memory as those of real steps do.

        An engine runs one pass to see how much that is; long steps are streamed, which takes more
        than a pass over what is in slots.
        """
        self._measures = True
        try:
            yield
        finally:
            self._measures = False

    def resize(self, shape: PoolShape) -> None:
        """Replace the base tier's pool; see `Tier.resize`."""
        self.base.resize(shape)

    def hottest(self) -> list[Key]:
        """Return the base tier's experts as (model layer, expert), the most valuable first."""
        return self.base.hottest()

    def preload(self, keys: list[Key]) -> None:
        """Fill the base tier's free slots before serving, on all ranks; see `Tier.preload`.

        Once every expert is present on every rank, no pass can miss one, and no step waits to see
        whether it did.
        """
        self.base.preload(keys)
        self._never_misses = self._agree(0 if self.base.is_full else 1) == 0

    def check_integrity(self) -> None:
        """Check every tier; see `Tier.check_integrity`."""
        for tier in self.tiers:
            tier.check_integrity()

    def close(self) -> None:
        """Release the stores."""
        for tier in self.tiers:
            tier.close()

    def _begin(self) -> None:
        self.failure = None
        self.lacking = 0
        self.counts.steps += 1
        self.base.begin_step()
        if self.fine is not None:
            # Which experts are fine decides what a step computes: on all ranks the same.
            self.fine.tier.begin_step(self._agree)

    def _may_fit(self, tokens: int) -> bool:
        """Say whether a step is to be repaired: it must fit, or be likely to.

        Steps want far fewer experts than they might: requests that decode side by side want many
        of the same. What the last one wanted is what this one is measured by; if it wants more
        than there are slots after all, it is streamed then.
        """
        if self.shape.working_set(tokens) <= self.shape.slots:
            return True
        if self._prompt or self._last_decode is None:
            return False
        before, wanted = self._last_decode
        is_likely = wanted * max(1.0, tokens / before) <= LIKELY * self.shape.slots
        # Ranks may have counted differently; one that streams beside one that repairs would hang.
        return self._agree(0 if is_likely else STREAM) == 0

    def _end(self, tokens: int) -> None:
        """Note what was used, and start to bring what is worth it."""
        if not self._prompt and not self._never_misses:
            self._last_decode = tokens, int(np.count_nonzero(self._wanted))
        if self.fine is not None and self.fine.by_use:
            self.fine.tier.policy.note(self._wanted, prompt=self._prompt)
        if self.failure is None:
            if not self._never_misses:
                self.base.promote()
            if self.fine is not None and self.fine.by_use:
                self.fine.tier.promote()
        self.counts.brought = self.base.brought
        self.counts.promoted = self.base.promoted

    def _repair_step(
        self, run: Callable[[], T], restore: Callable[[], object], *, counted: bool = False
    ) -> T:
        """Run passes until none misses an expert; `counted` as for `_stream_step`."""
        passes = len(self.shape.layers) + 2
        for number in range(passes):
            if number:
                restore()
            output = self._pass(run)
            if self._never_misses:
                return output
            missing = self.policy.want(self._wanted)
            if self.fine is not None:
                missing = [key for key in missing if self.fine.tier.policy.slot_of[key] < 0]
            if not number and not counted:
                self.counts.wanted += int(np.count_nonzero(self._wanted))
                self.counts.missed += len(missing)
            report = self._agree(self._fetch(self.base, missing, self.tolerance))
            if report >= FAIL:
                self.failure = self.failure or MoetError(OTHER_RANK)
                return output
            if report >= STREAM:
                restore()
                return self._stream_step(run, "stream", counted=True)
            if report <= self.tolerance:
                self.lacking = report
                self.counts.repaired += number > 0 and not counted
                return output
        raise MoetError(
            f"A step still misses experts after {passes} passes over {passes - 2} layers. "
            "Each pass makes one more layer's routing final, so the passes differ: is there a "
            "model state that a pass changes? Serve without a pool, and please report it."
        )

    def _bring_certain(self, keys: Iterable[Key]) -> None:
        """Bring experts before the pass that will want them.

        What cannot be brought is missed by that pass, and brought or refused then.
        """
        if self.fine is not None:
            slot_of = self.fine.tier.policy.slot_of
            keys = [key for key in keys if slot_of[key] < 0]
        absent = [key for key in keys if self.policy.slot_of[key] < 0]
        started = time.perf_counter()
        with contextlib.suppress(PackError, WorkingSetError):
            self.counts.missed += self.base.bring(absent) if absent else 0
        self.counts.stall_seconds += time.perf_counter() - started

    def _pass(self, run: Callable[[], T]) -> T:
        """Run one pass; `_wanted` has its marks."""
        self.counts.passes += 1
        if self._marks:
            self.pool.clear_wanted(self._tokens)
        self._taken = None
        self._may_look = self._stream is None
        self._seen[:] = False
        return run()

    def _look(self, marks: NDArray[np.bool_]) -> None:
        """Start to read what a pass, while it still runs, has been found to miss."""
        absent = marks & ~self._seen & (self.policy.slot_of < 0)
        if self.fine is not None:
            absent &= self.fine.tier.policy.slot_of < 0
        self._seen |= marks
        keys = [self.base.model_key((int(layer), int(e))) for layer, e in np.argwhere(absent)]
        with contextlib.suppress(PackError):  # who needs the row will be told
            self.store.start(keys)

    def _fetch(self, tier: Tier, keys: list[Key], tolerance: int = 0) -> int:
        """Bring experts that a pass needs; return how many it missed, or STREAM or FAIL."""
        if len(keys) <= tolerance:
            return len(keys)
        started = time.perf_counter()
        try:
            tier.bring(keys)
        except PackError as error:
            self.failure = error
            return FAIL
        except WorkingSetError:
            return STREAM
        finally:
            self.counts.stall_seconds += time.perf_counter() - started
        return len(keys)

    def _gate_step(
        self,
        fine: FineTier,
        gate: Gate,
        output: T,
        run: Callable[[], T],
        restore: Callable[[], object],
        read: Callable[[T], Reading | None],
    ) -> T:
        """Run a step again with fine experts if the gate says so."""
        if self.failure is not None or self.lacking:
            return output
        before = read(output)
        decision = gate.decide(before) if before is not None else "pass"
        codes: tuple[Literal["pass", "fire", "audit"], ...] = ("pass", "audit", "fire")
        agreed = codes[self._agree(codes.index(decision))]
        if agreed == "pass":
            return output
        started = time.perf_counter()
        output = self._finer(fine, gate, output, run, restore)
        if self.failure is None:
            after = read(output)
            if before is not None and after is not None:
                gate.ended(agreed, before, after, time.perf_counter() - started)
        return output

    def _finer(
        self,
        fine: FineTier,
        gate: Gate,
        output: T,
        run: Callable[[], T],
        restore: Callable[[], object],
    ) -> T:
        """Promote what the step was routed to, and run it again, as far as the budget goes."""
        left = gate.settings.budget or self.shape.all_experts
        passes = gate.settings.passes or len(self.shape.layers) + 2
        for _ in range(passes):
            lacking = fine.tier.policy.want(self._wanted)[:left]
            report = self._agree(self._fetch(fine.tier, lacking))
            if report >= FAIL:
                self.failure = self.failure or MoetError(OTHER_RANK)
                return output
            if report >= STREAM:
                if gate.settings.budget:
                    return output  # streaming would bring every expert of the step
                restore()
                gate.counts.passes += 1
                return self._stream_step(run, "stream fine", counted=True)
            if report == 0:
                return output
            # What all ranks agreed on: after a fault their tiers may differ.
            left -= report
            gate.counts.promoted += len(lacking)
            gate.counts.passes += 1
            restore()
            output = self._repair_step(run, restore, counted=True)
            if self.failure is not None or left <= 0:
                return output
        return output

    def _stream_step(
        self,
        run: Callable[[], T],
        mode: Literal["stream", "stream fine"],
        *,
        counted: bool = False,
    ) -> T:
        """Run a step layer by layer; `counted` says that what it wants was counted before."""
        self.counts.streamed += 1
        before = self.counts.wanted, self.counts.missed
        fine = self.fine.tier if self.fine is not None else None
        if mode == "stream fine" and fine is not None:
            stream = LayerStream(fine, None, self.pool, self.counts)
        else:
            stream = LayerStream(self.base, fine, self.pool, self.counts)
        self._stream = stream
        try:
            output = self._pass(run)
        finally:
            self._stream = None
        self.failure = self.failure or stream.failure
        if counted:
            self.counts.wanted, self.counts.missed = before
        if mode == "stream":
            self.policy.note(self._wanted, prompt=self._prompt)
        if self._agree(FAIL if self.failure else 0):
            self.failure = self.failure or MoetError(OTHER_RANK)
        return output
