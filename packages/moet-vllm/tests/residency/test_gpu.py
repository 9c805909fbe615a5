"""Pools on a GPU under CUDA graphs: the bits of all experts, and no wait that need not be."""

import contextlib
import os
import random
import threading
import time
import warnings

import pytest
import torch
from graph_model import (
    EXPERTS,
    LAYERS,
    TOP_K,
    GraphModel,
    Serving,
    fine_tier,
    padded,
    tokens,
)

from moet_store.engines import PoolEngine
from moet_vllm.residency import copies as module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # PyTorch warns that it does not see all of them.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

ALL = len(LAYERS) * EXPERTS
ONE_TOKEN = len(LAYERS) * TOP_K
COUNTS = [1, 1, 2, 3, 1, 4, 16, 64]


@pytest.fixture(scope="module")
def model():
    return GraphModel()


@pytest.fixture(scope="module")
def pack(model, tmp_path_factory):
    return model.write_pack(tmp_path_factory.mktemp("pack"))


@pytest.fixture
def open_store(model, pack):
    """Return a function that opens a store by its kind; all stores are closed at the end."""

    def open_(kind, engine=None):
        if kind == "pinned":
            return model.pinned()
        return model.packed(pack, {"pack": 0, "arena": 24, "large arena": ALL}[kind], engine)

    yield open_
    model.close()


def same(got, wanted):
    assert torch.equal(got, wanted), f"largest difference {(got - wanted).abs().max()}"


def fill(serving):
    serving.resident.preload([(layer, e) for layer in LAYERS for e in range(EXPERTS)])


@pytest.mark.parametrize("kind", ["pinned", "pack", "arena", "large arena"])
@pytest.mark.parametrize("slots", [EXPERTS, ONE_TOKEN + 1, ALL // 2, ALL - 1, ALL])
def test_any_pool_over_any_store_gives_the_bits_of_all_experts(model, open_store, kind, slots):
    serving = Serving(model, slots, open_store(kind))
    for seed in range(24):
        x = tokens(COUNTS[seed % len(COUNTS)], seed)
        same(serving.step(x), model.alone(x))
        assert serving.resident.failure is None
        serving.resident.check_integrity()
    counts = serving.resident.counts
    assert counts.missed > 0
    assert (counts.streamed == 0) == (slots == ALL)
    assert counts.repaired > 0 or slots < ONE_TOKEN


@pytest.mark.parametrize("fine_slots", [EXPERTS, ALL // 2, ALL])
@pytest.mark.parametrize("slots", [EXPERTS, ALL // 2, ALL])
def test_a_gate_that_always_fires_gives_the_bits_of_all_experts_fine(
    model, open_store, slots, fine_slots
):
    fine = fine_tier(model, fine_slots, tau=1.0)
    serving = Serving(model, slots, open_store("pinned"), fine)
    for seed in range(16):
        x = tokens(COUNTS[seed % len(COUNTS)], seed)
        same(serving.step(x, prompt=len(x) > 4), model.alone(x, "fp4-mx"))
        serving.resident.check_integrity()
    assert fine.gate.counts.fires == fine.gate.counts.checked == 12


def test_a_gate_that_never_fires_gives_the_bits_of_the_base(model, open_store):
    fine = fine_tier(model, ALL // 2, tau=0.0)
    serving = Serving(model, ALL // 2, open_store("pinned"), fine)
    for seed in range(16):
        x = tokens(COUNTS[seed % len(COUNTS)], seed)
        prompt = len(x) > 4
        same(serving.step(x, prompt=prompt), model.alone(x, "fp4-mx" if prompt else "w2"))
    assert fine.gate.counts.fires == 0


def test_padding_wants_no_experts(model, open_store):
    serving = Serving(model, ALL, open_store("pinned"))
    serving.step(tokens(4, 0))
    x = tokens(3, 1)
    same(serving.step(x), model.alone(x))
    got = serving.resident._wanted.copy()
    serving.step(tokens(1, 1))
    streamed = Serving(model, EXPERTS, open_store("pinned"))
    streamed.step(x)
    assert (got == streamed.resident._wanted).all(), "the fourth row of the graph wanted experts"
    with_padding = sum(len(routed) for routed in routings(model, padded(x)))
    assert got.sum() == sum(len(routed) for routed in routings(model, x)) < with_padding


def routings(model, x):
    """Return the experts that every layer routes to where all are present."""
    found = []
    serving = Serving(model, ALL, model.pinned())
    fill(serving)

    def run_layer(number, x, weights, ids, limit):
        found.append(set(ids.flatten().tolist()))
        return serving.resident.run_layer(number, x, weights, ids, limit)

    model.forward(x, run_layer)
    return found


@contextlib.contextmanager
def unseen_waits_refused():
    """Let what stops the host without an event, such as copying pageable memory, be an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_step_that_cannot_miss_waits_for_nothing(model, open_store, monkeypatch):
    serving = Serving(model, ALL, open_store("pinned"))
    fill(serving)
    wanted = [model.alone(tokens(count, count)) for count in (1, 2, 4)]
    inputs = [tokens(count, count) for count in (1, 2, 4)]
    monkeypatch.setattr(module.Moment, "wait", lambda self: pytest.fail("the host waited"))
    with unseen_waits_refused():
        got = [serving.step(x) for x in inputs]
    for mine, right in zip(got, wanted, strict=True):
        same(mine, right)
    assert serving.resident.counts.passes == 3


@pytest.mark.parametrize("slots", [EXPERTS, ONE_TOKEN + 1, ALL // 2])
def test_no_step_waits_for_the_device_unseen(model, open_store, slots):
    serving = Serving(model, slots, open_store("pinned"))
    inputs = [tokens(COUNTS[seed % len(COUNTS)], seed) for seed in range(16)]
    wanted = [model.alone(x) for x in inputs]
    serving.step(inputs[-1])
    with unseen_waits_refused():
        got = [serving.step(x) for x in inputs]
    for mine, right in zip(got, wanted, strict=True):
        same(mine, right)


def slow_engine(choose):
    """Return an engine whose reads take up to 3 ms, in any order."""

    def preadv(fd, buffers, offset):
        time.sleep(choose.random() * 0.003)
        return os.preadv(fd, buffers, offset)

    return PoolEngine(4, preadv)


def test_reads_begin_while_a_pass_still_runs(model, open_store):
    store = open_store("large arena")
    serving = Serving(model, ALL // 2, store)
    forward, start, asked = serving._forward, store.start, []

    def slow(x):
        output = forward(x)
        torch.cuda._sleep(60_000_000)
        return output

    serving._forward, serving.graphs = slow, {}
    store.start = lambda keys: (asked.extend(keys), start(keys))
    for seed in range(40, 44):
        x = tokens(1, seed)
        same(serving.step(x), model.alone(x))
        serving.resident.check_integrity()
        store.check_integrity()
    assert len(asked) > TOP_K


def test_promotions_are_never_waited_for(model, open_store):
    hold = threading.Event()
    hold.set()

    def preadv(fd, buffers, offset):
        hold.wait(20)
        return os.preadv(fd, buffers, offset)

    x, prompt = tokens(1, 0), tokens(64, 1)
    wanted, of_prompt = model.alone(x), model.alone(prompt)
    store = open_store("pack", PoolEngine(4, preadv))
    serving = Serving(model, ALL // 2, store)
    resident = serving.resident
    found = routings(model, x)
    resident.preload([(layer, e) for layer, r in zip(LAYERS, found, strict=True) for e in r])
    promote = resident.base.promote

    def promote_from_a_store_that_hangs():
        hold.clear()
        promote()

    resident.base.promote = promote_from_a_store_that_hangs
    same(serving.step(prompt), of_prompt)
    del resident.base.promote
    waiting = [resident.base.model_key(key) for key in resident.base._promoting]
    begun = time.monotonic()
    for _ in range(3):
        same(serving.step(x), wanted)
    assert time.monotonic() - begun < 10, "a step waited for a read"
    assert "coming" in store.states(waiting)
    before = resident.counts.promoted
    hold.set()
    while resident.counts.promoted == before and time.monotonic() - begun < 20:
        same(serving.step(x), wanted)
        resident.check_integrity()
    assert resident.counts.promoted > before
    assert resident.counts.repaired == 0


def test_promotions_arrive_over_several_steps_of_a_slow_store(model, open_store):
    store = open_store("large arena", slow_engine(random.Random(1)))
    serving = Serving(model, ALL // 2, store)
    for seed in range(60):
        x = tokens(4 if seed % 4 == 3 else 64, seed % 7)
        same(serving.step(x), model.alone(x))
        serving.resident.check_integrity()
        store.check_integrity()
    assert serving.resident.counts.promoted > 16


def test_random_steps_over_random_pools(model, open_store):
    choose = random.Random(1)
    inputs = [tokens(choose.choice([1, 1, 1, 2, 3, 4, 9, 40]), seed) for seed in range(40)]
    answers = [model.alone(x) for x in inputs]
    kinds = ["pinned", "pack", "arena", "large arena"]
    for number in range(300):
        if number % 30 == 0:
            kind = choose.choice(kinds)
            engine = None if kind == "pinned" else slow_engine(choose)
            store = open_store(kind, engine)
            serving = Serving(model, choose.randint(EXPERTS, ALL), store)
        which = choose.randrange(len(inputs))
        same(serving.step(inputs[which]), answers[which])
        serving.resident.check_integrity()
        if kind != "pinned":
            store.check_integrity()
