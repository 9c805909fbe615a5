"""The fine tier and the gate over small pools: exact where they promise it, counted where not."""

import errno
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_model import (
    EXPERTS,
    FINE_LAYOUT,
    HIDDEN,
    INTERMEDIATE,
    MODEL_LAYERS,
    TOP_K,
    VOCABULARY,
    SmallModel,
    tokens,
)

from moet_core.gate import Gate, GateChange, GateSettings, changed
from moet_kernels.experts import Tier, experts
from moet_store import PackErrorKind
from moet_store.engines import PoolEngine
from moet_vllm.residency.sampled import SampledRows, reading_of

ALL = len(MODEL_LAYERS) * EXPERTS
ONE_TOKEN = len(MODEL_LAYERS) * TOP_K


@pytest.fixture(scope="module")
def model():
    return SmallModel()


def gated(model, slots, fine_slots, *, prompts=True, base=None, fine_store=None, **settings):
    """Return pools with a gate; every pass it takes is allowed unless `settings` say otherwise."""
    gate = Gate(GateSettings(**({"passes": 0} | settings)))
    store = fine_store or model.pinned(fine=True)
    fine = model.fine_tier(fine_slots, store, gate=gate, prompts=prompts)
    return model.resident(slots, base or model.pinned(), fine=fine)


def same(got, wanted):
    assert torch.equal(got, wanted), f"largest difference {(got - wanted).abs().max()}"


@pytest.mark.parametrize("fine_slots", [EXPERTS, ONE_TOKEN, ALL // 2, ALL])
@pytest.mark.parametrize("slots", [EXPERTS, ALL // 2, ALL])
def test_a_gate_that_always_fires_gives_the_bits_of_all_experts_fine(model, slots, fine_slots):
    resident = gated(model, slots, fine_slots, tau=1.0)
    for seed in range(12):
        x = tokens([1, 2, 1, 9][seed % 4], seed)
        same(model.step(resident, x, prompt=len(x) == 9), model.alone(x, fine=True))
        resident.check_integrity()
    gate = resident.fine.gate
    assert gate.counts.fires == gate.counts.checked == 9


@pytest.mark.parametrize("slots", [EXPERTS, ALL // 2, ALL])
def test_a_gate_that_never_fires_gives_the_bits_of_the_base(model, slots):
    resident = gated(model, slots, ALL // 2, tau=0.0, prompts=False)
    for seed in range(8):
        x = tokens([1, 2, 1, 9][seed % 4], seed)
        same(model.step(resident, x, prompt=len(x) == 9), model.alone(x))
    assert resident.fine.gate.counts.fires == 0
    assert resident.fine.tier.brought == 0


def test_prompts_are_read_with_fine_experts_and_leave_both_tiers_alone(model):
    resident = gated(model, ALL // 2, ALL // 2, tau=0.0)
    prompt = tokens(20, 3)
    same(model.step(resident, prompt, prompt=True), model.alone(prompt, fine=True))
    assert resident.policy.resident == resident.fine.tier.policy.resident == 0
    x = tokens(1, 4)
    same(model.step(resident, x), model.alone(x))


def test_what_is_fine_already_needs_no_fire(model):
    resident = gated(model, ALL, ALL, tau=1.0)
    x = tokens(1, 0)
    model.step(resident, x)
    promoted = resident.fine.gate.counts.promoted
    assert promoted >= ONE_TOKEN
    passes = resident.counts.passes
    same(model.step(resident, x), model.alone(x, fine=True))
    assert resident.counts.passes == passes + 1
    assert resident.fine.gate.counts.promoted == promoted


def test_only_what_is_uncertain_runs_again(model):
    confidences = []
    plain = model.resident(ALL, model.pinned())
    for seed in range(40):
        output = model.step(plain, tokens(1, seed))
        confidences.append(float(model.read(output).confidence[0]))
    tau = float(np.median(confidences))
    for seed in range(40):
        fresh = gated(model, ALL, ALL, tau=tau)
        got = model.step(fresh, tokens(1, seed))
        fired = confidences[seed] <= tau
        assert fresh.fine.gate.counts.fires == fired
        same(got, model.alone(tokens(1, seed), fine=fired))


def test_a_step_promotes_no_more_than_its_budget(model):
    for budget in (1, 3, 5):
        resident = gated(model, ALL, ALL, tau=1.0, budget=budget)
        for seed in range(6):
            before = resident.fine.tier.brought
            model.step(resident, tokens(2, seed))
            assert resident.fine.tier.brought - before <= budget
            resident.check_integrity()
        assert resident.fine.gate.counts.promoted == resident.fine.tier.brought > 0


def test_a_step_takes_no_more_passes_than_it_may(model):
    resident = gated(model, ALL, ALL, tau=1.0, passes=1)
    resident.preload([(layer, expert) for layer in MODEL_LAYERS for expert in range(EXPERTS)])
    for seed in range(6):
        before = resident.counts.passes
        model.step(resident, tokens(1, seed))
        assert resident.counts.passes - before <= 2


def held_fine(model, x, held):
    """Return what x gives where the experts in `held`, bool [layers, experts], are fine."""

    def run_layer(number, x, weights, ids, limit):
        slots = torch.arange(EXPERTS, dtype=torch.int32)
        fine = slots.masked_fill(torch.from_numpy(~held[number]), -1)
        return experts(
            x,
            weights,
            ids,
            model.rows[number],
            slots,
            hidden=HIDDEN,
            intermediate=INTERMEDIATE,
            codec="w2",
            swiglu_limit=limit,
            fine=Tier(model.fine_rows[number], fine, FINE_LAYOUT),
        )

    return model.forward(x.clone(), run_layer)


@pytest.mark.parametrize("slots", [EXPERTS, ALL])
def test_between_the_ends_a_step_is_certain_or_fine_throughout(model, slots):
    """With drafts: rows that cannot be emitted decide nothing, and all rows of a fire are fine."""
    tau, choose = 0.2, random.Random(3)
    resident = gated(model, slots, ALL // 2, tau=tau)
    found = {"certain": 0, "certain but for unreachable rows": 0, "fine": 0}
    for seed in range(120):
        drafts = [[0] * choose.randint(0, 3) for _ in range(choose.randint(1, 2))]
        x = tokens(sum(len(part) + 1 for part in drafts), seed)
        first = held_fine(model, x, resident.fine.tier.policy.slot_of >= 0)
        rows = iter((first @ model.head).argmax(-1).tolist())
        for part in drafts:
            says = [next(rows) for _ in range(len(part) + 1)]
            part[:] = [token if choose.random() < 0.6 else 99 for token in says[:-1]]
        reading = model.read(first, drafts)
        is_certain = (reading.confidence[reading.counts] > tau).all()
        got = model.step(resident, x, drafts=drafts)
        same(got, first if is_certain else model.alone(x, fine=True))
        found["certain" if is_certain else "fine"] += 1
        found["certain but for unreachable rows"] += is_certain and reading.confidence.min() <= tau
        resident.check_integrity()
    assert min(found.values()) >= 10, found


def test_a_gate_can_be_set_between_steps(model):
    resident = gated(model, ALL, ALL, tau=0.0)
    x = tokens(1, 0)
    same(model.step(resident, x), model.alone(x))
    gate = resident.fine.gate
    gate.settings = changed(gate.settings, GateChange(tau=1.0))
    same(model.step(resident, x), model.alone(x, fine=True))
    gate.settings = changed(gate.settings, GateChange(gate_budget=1))
    brought = resident.fine.tier.brought
    model.step(resident, tokens(2, 3))
    assert resident.fine.tier.brought == brought + 1


def test_audits_run_certain_steps_again(model):
    resident = gated(model, ALL, ALL, tau=0.0, audit=1.0)
    x = tokens(1, 0)
    same(model.step(resident, x), model.alone(x, fine=True))
    assert (resident.fine.gate.counts.audits, resident.fine.gate.counts.fires) == (1, 0)


def test_flips_are_counted(model):
    flips = 0
    for seed in range(30):
        x = tokens(1, seed)
        fresh = gated(model, ALL, ALL, tau=1.0)
        model.step(fresh, x)
        base, fine = model.alone(x) @ model.head, model.alone(x, fine=True) @ model.head
        assert fresh.fine.gate.counts.flipped == int(base.argmax() != fine.argmax())
        flips += fresh.fine.gate.counts.flipped
    assert 0 < flips < 30


def test_without_a_gate_use_fills_the_fine_tier(model):
    fine = model.fine_tier(ALL // 2, model.pinned(fine=True), by_use=True, prompts=False)
    resident = model.resident(ALL, model.pinned(), fine=fine)
    x = tokens(1, 0)
    for _ in range(12):
        got = model.step(resident, x)
        resident.check_integrity()
    assert fine.tier.promoted > 0
    same(got, model.alone(x, fine=True))


def test_a_fine_expert_needs_no_base(model):
    fine = model.fine_tier(ALL, model.pinned(fine=True), prompts=False)
    resident = model.resident(ALL // 2, model.pinned(), fine=fine)
    fine.tier.preload([(layer, expert) for layer in MODEL_LAYERS for expert in range(EXPERTS)])
    x = tokens(1, 0)
    same(model.step(resident, x), model.alone(x, fine=True))
    assert resident.counts.missed == resident.base.brought == 0


def test_ranks_fire_together(model):
    """A rank that has no logits runs again because another one fires."""
    codes = []

    def agree(value):
        codes.append(value)
        return max(value, 2) if len(codes) == 2 else value

    gate = Gate(GateSettings(tau=0.0, passes=0))
    fine = model.fine_tier(ALL, model.pinned(fine=True), gate=gate, prompts=False)
    resident = model.resident(ALL, model.pinned(), fine=fine, agree=agree)
    resident.preload([(layer, expert) for layer in MODEL_LAYERS for expert in range(EXPERTS)])
    x = tokens(1, 0)
    inputs = x.clone()
    got = resident.step(
        lambda: model.forward(inputs, resident.run_layer),
        1,
        lambda: inputs.copy_(x),
        read=lambda _: None,
    )
    same(got, model.alone(x, fine=True))


class Ranks:
    """Two ranks in threads of their own, which agree as tensor-parallel ranks do."""

    def __init__(self):
        self._barrier = threading.Barrier(2, timeout=20)
        self._values = [0, 0]

    def agree(self, rank):
        def agree(value):
            self._values[rank] = value
            self._barrier.wait()
            largest = max(self._values)
            self._barrier.wait()
            return largest

        return agree

    def run(self, *steps):
        """Run what each rank does side by side; a rank that waits alone is an error."""
        with ThreadPoolExecutor(2) as pool:
            return [future.result() for future in [pool.submit(step) for step in steps]]


@pytest.mark.parametrize("budget", [0, 3])
@pytest.mark.parametrize("by_use", [False, True])
def test_ranks_stay_in_step_after_one_of_them_could_not_read(model, tmp_path, budget, by_use):
    faults = []

    def preadv(fd, buffers, offset):
        if faults:
            raise OSError(faults.pop(), "injected")
        return os.preadv(fd, buffers, offset)

    ranks, residents = Ranks(), []
    pack = model.write_pack(tmp_path, fine=True)
    for rank in range(2):
        store = model.packed(pack, 0, PoolEngine(1, preadv if rank == 0 else os.preadv))
        gate = None if by_use else Gate(GateSettings(tau=1.0, passes=0, budget=budget))
        fine = model.fine_tier(ALL // 2, store, gate=gate, by_use=by_use, prompts=False)
        residents.append(
            model.resident(ALL // 2, model.pinned(), fine=fine, agree=ranks.agree(rank))
        )
    for number in range(12):
        x = tokens(1, number % 4)
        if number in (0, 4):
            faults.append(errno.EIO)
        outputs = ranks.run(*(partial(model.step, resident, x) for resident in residents))
        assert (residents[0].failure is None) == (residents[1].failure is None)
        if residents[0].failure is None and by_use:
            same(outputs[0], outputs[1])
        for resident in residents:
            resident.check_integrity()
    for resident in residents:
        resident.close()


@pytest.mark.parametrize("prompt", [False, True])
def test_a_fine_row_that_cannot_be_read_fails_the_step_and_not_the_next(model, tmp_path, prompt):
    faults = []

    def preadv(fd, buffers, offset):
        if faults:
            raise OSError(faults.pop(), "injected")
        return os.preadv(fd, buffers, offset)

    store = model.packed(model.write_pack(tmp_path, fine=True), 0, PoolEngine(1, preadv))
    resident = gated(model, ALL, ALL, tau=1.0, fine_store=store)
    x = tokens(9 if prompt else 1, 0)
    faults.append(errno.EIO)
    model.step(resident, x, prompt=prompt)
    assert resident.failure.kind is PackErrorKind.IO
    resident.check_integrity()
    same(model.step(resident, x, prompt=prompt), model.alone(x, fine=True))
    assert resident.failure is None
    resident.close()


def test_random_steps_of_both_tiers_under_faults_are_right_or_failed(model, tmp_path):
    """MOET_STEPS sets the number of steps; the tables are checked after every one of them."""
    steps = int(os.environ.get("MOET_STEPS", "300"))
    choose = random.Random(2)
    level = 0.0

    def preadv(fd, buffers, offset):
        if choose.random() < level:
            raise OSError(choose.choice([errno.EIO, errno.EAGAIN]), "injected")
        return os.preadv(fd, buffers, offset)

    inputs = [tokens(count, seed) for seed, count in enumerate([1] * 20 + [2] * 6 + [17] * 4)]
    answers = [(model.alone(x), model.alone(x, fine=True)) for x in inputs]
    base, fine = model.write_pack(tmp_path), model.write_pack(tmp_path, fine=True)
    failed = 0
    stores = []
    for number in range(steps):
        if number % 50 == 0:
            stores = [
                model.packed(pack, choose.choice([0, 6, ALL]), PoolEngine(1, preadv))
                for pack in (base, fine)
            ]
            always = choose.random() < 0.5
            resident = gated(
                model,
                choose.randint(EXPERTS, ALL),
                choose.randint(EXPERTS, ALL),
                base=stores[0],
                fine_store=stores[1],
                tau=float(always),
                prompts=always,
            )
        which = choose.randrange(len(inputs))
        level = choose.choice([0.0, 0.0, 0.1, 0.5])
        got = model.step(resident, inputs[which], prompt=len(inputs[which]) == 17)
        level = 0.0
        if resident.failure is None:
            same(got, answers[which][always])
        failed += resident.failure is not None
        resident.check_integrity()
        for store in stores:
            store.check_integrity()
        if number % 50 == 49:
            resident.close()
    assert steps // 50 < failed < steps


def test_logits_that_were_read_are_handed_to_vllm_once():
    computed = []

    def compute(hidden):
        computed.append(hidden)
        return hidden * 2

    batch = SimpleNamespace(num_reqs=2, sampling_metadata=SimpleNamespace(all_greedy=True))
    runner = SimpleNamespace(
        model=SimpleNamespace(compute_logits=compute),
        input_batch=batch,
        _prepare_inputs=lambda: (torch.tensor([0, 2]), None),
    )
    rows = SampledRows(runner)
    assert runner._prepare_inputs()[1] is None
    hidden = torch.arange(12.0).view(3, 4)
    reading = rows.read("margin", hidden)
    assert reading.token.tolist() == [3, 3]
    assert reading.confidence.tolist() == [2.0, 2.0]
    assert len(computed) == 1
    assert torch.equal(runner.model.compute_logits(hidden[[0, 2]]), hidden[[0, 2]] * 2)
    assert len(computed) == 1, "vLLM got what was computed already"
    runner.model.compute_logits(hidden)
    assert len(computed) == 2
    rows.read("margin", hidden)
    runner._prepare_inputs()
    runner.model.compute_logits(hidden)
    assert len(computed) == 4, "a new step must not get the logits of the last one"


def test_a_reading_is_that_of_a_softmax_in_float64():
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    reading = reading_of("max_prob", logits.bfloat16(), None)
    exact = logits.bfloat16().double().softmax(-1).max(-1)
    assert reading.token.tolist() == exact.indices.tolist()
    np.testing.assert_allclose(reading.confidence, exact.values.numpy(), rtol=1e-5)
    assert reading.counts.all()


def test_a_margin_is_the_distance_of_the_two_largest_logits():
    logits = torch.randn(7, VOCABULARY, generator=torch.Generator().manual_seed(1)).bfloat16()
    reading = reading_of("margin", logits, None)
    top = logits.float().topk(2)
    assert reading.token.tolist() == top.indices[:, 0].tolist()
    assert reading.confidence.tolist() == (top.values[:, 0] - top.values[:, 1]).tolist()


def test_token_ids_come_through_a_reading_as_they_are():
    logits = torch.zeros(2, 2**24 + 4)
    logits[0, 2**24 + 3] = logits[1, 2**24 + 1] = 1.0  # float32 would round both
    for signal in ("max_prob", "margin"):
        assert reading_of(signal, logits, None).token.tolist() == [2**24 + 3, 2**24 + 1]
