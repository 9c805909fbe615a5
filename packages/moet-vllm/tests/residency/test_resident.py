"""Steps over a pool against the same steps with every expert present: equal in every bit."""

import errno
import os
import random
from itertools import pairwise

import pytest
import torch
from small_model import EXPERTS, MODEL_LAYERS, TOP_K, SmallModel, tokens

from moet_core.errors import MoetError
from moet_store import PackErrorKind
from moet_store.engines import PoolEngine
from moet_vllm.residency import resident as module
from moet_vllm.residency.tier import PROMOTIONS

ALL = len(MODEL_LAYERS) * EXPERTS
ONE_TOKEN = len(MODEL_LAYERS) * TOP_K


@pytest.fixture(scope="module")
def model():
    return SmallModel()


@pytest.fixture(scope="module")
def pack(model, tmp_path_factory):
    return model.write_pack(tmp_path_factory.mktemp("pack"))


@pytest.fixture
def open_store(model, pack):
    """Return a function that opens a store by its kind; all are closed at the end."""
    opened = []

    def open_(kind, engine=None):
        if kind == "pinned":
            opened.append(model.pinned())
        else:
            arena = {"pack": 0, "arena": 6, "large arena": ALL}[kind]
            opened.append(model.packed(pack, arena, engine))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


def same(got, wanted):
    assert torch.equal(got, wanted), f"largest difference {(got - wanted).abs().max()}"


@pytest.mark.parametrize("kind", ["pinned", "pack", "arena", "large arena"])
@pytest.mark.parametrize("slots", [EXPERTS, ONE_TOKEN + 1, ALL // 2, ALL - 1, ALL])
def test_any_pool_over_any_store_gives_the_bits_of_all_experts(model, open_store, kind, slots):
    resident = model.resident(slots, open_store(kind))
    for seed in range(20):
        x = tokens([1, 1, 2, 1, 3, 16][seed % 6], seed)
        same(model.step(resident, x), model.alone(x))
        assert resident.failure is None
        assert resident.lacking == 0
        resident.check_integrity()
    assert resident.counts.steps == 20
    if slots == ALL:
        assert resident.counts.streamed == 0
    if slots == EXPERTS:
        assert resident.counts.streamed > 0
    assert resident.counts.missed > 0


def test_a_warm_pool_of_all_experts_misses_nothing(model, open_store):
    resident = model.resident(ALL, open_store("pinned"))
    resident.preload([(layer, expert) for layer in MODEL_LAYERS for expert in range(EXPERTS)])
    for seed in range(5):
        x = tokens(4, seed)
        same(model.step(resident, x), model.alone(x))
    assert (resident.counts.passes, resident.counts.missed) == (5, 0)


def test_repairing_finds_what_only_the_repaired_routing_misses(open_store):
    """Fixing layer i changes the experts of layer i + 1, down to the last layer."""
    model = SmallModel(seed=3)
    resident = model.resident(ONE_TOKEN, model.pinned())
    routings = []
    x = tokens(1, 33)
    inputs = x.clone()

    def run():
        output = model.forward(inputs, resident.run_layer)
        routings.append(model.routings)
        return output

    output = resident.step(run, 1, lambda: inputs.copy_(x))
    same(output, model.alone(x))
    moved = [
        [number for number, routed in enumerate(before) if routed != after[number]]
        for before, after in pairwise(routings)
    ]
    assert moved == [[1, 2, 3], [2, 3], [3], []]
    assert resident.counts.repaired == 1
    assert resident.counts.passes == len(MODEL_LAYERS) + 1


def like(x, count):
    """Return so many tokens that are routed as x is."""
    return x.repeat(count, 1)


def test_requests_that_want_the_same_experts_are_repaired_whatever_they_might_want(model):
    resident = model.resident(ONE_TOKEN + 4, model.pinned())
    for number, seed in enumerate([5, 5, 6, 7]):
        many = like(tokens(1, seed), 6)
        same(model.step(resident, many), model.alone(many))
        resident.check_integrity()
        assert resident.counts.streamed == 1, f"step {number}"
    assert resident.counts.repaired == 2


def test_a_step_that_wants_more_than_was_likely_is_streamed_after_all(model):
    resident = model.resident(ONE_TOKEN + 4, model.pinned())
    model.step(resident, like(tokens(1, 5), 6))
    passes, other = resident.counts.passes, tokens(6, 7)
    for number in range(3):
        same(model.step(resident, other), model.alone(other))
        resident.check_integrity()
        assert resident.counts.streamed == 2 + number
    assert resident.counts.passes == passes + 4, "only the first of them was tried"


def test_a_step_is_streamed_if_another_rank_streams_it(model):
    asked = []

    def agree(value):
        asked.append(value)
        return max(value, module.STREAM) if len(asked) == 2 else value

    resident = model.resident(ONE_TOKEN + 4, model.pinned(), agree=agree)
    many = like(tokens(1, 5), 6)
    for _ in range(2):
        same(model.step(resident, many), model.alone(many))
    assert asked[1] == 0, "this rank would have repaired"
    assert resident.counts.streamed == 2
    assert resident.counts.repaired == 0


def test_prompts_are_streamed_whatever_decoding_wants(model):
    resident = model.resident(ONE_TOKEN + 4, model.pinned())
    many = like(tokens(1, 5), 6)
    model.step(resident, many)
    model.step(resident, many, prompt=True)
    assert resident.counts.streamed == 2


def test_a_long_prompt_is_streamed_and_leaves_the_working_set_alone(model, open_store):
    store = open_store("large arena")
    resident = model.resident(ONE_TOKEN + 4, store)
    x = tokens(1, 5)
    model.step(resident, x)
    held = set(resident.hottest())
    prompt = tokens(32, 6)
    same(model.step(resident, prompt), model.alone(prompt))
    assert resident.counts.streamed == 1
    assert held <= set(resident.hottest()), "a prompt evicted what decoding uses"
    passes = resident.counts.passes
    same(model.step(resident, x), model.alone(x))
    assert resident.counts.passes == passes + 1, "the decode step after the prompt was repaired"


def test_a_long_prompt_pushes_nothing_out_of_the_arena(model, open_store):
    store = open_store("arena")
    resident = model.resident(ONE_TOKEN, store)
    model.step(resident, tokens(1, 5))
    before = store.counters().evictions
    same(model.step(resident, tokens(32, 6)), model.alone(tokens(32, 6)))
    assert store.counters().evictions == before


def test_experts_that_prompts_want_are_promoted_between_steps(model, open_store):
    resident = model.resident(ALL - 1, open_store("pinned"))
    model.step(resident, tokens(32, 1))
    assert resident.policy.resident == 0
    for seed in range(8):
        model.step(resident, tokens(32, seed))
        resident.check_integrity()
    assert resident.counts.promoted > 0
    assert resident.policy.resident >= PROMOTIONS


def failing_engine(plan):
    """Return an engine whose reads do what `plan()` says: None, an errno, or a share to read."""

    def preadv(fd, buffers, offset):
        fault = plan()
        if fault is None:
            return os.preadv(fd, buffers, offset)
        if fault > 0:
            raise OSError(fault, os.strerror(fault))
        # A short read of whole sectors, as drives give them.
        (buffer,) = buffers
        return os.preadv(fd, [buffer[: max(4096, len(buffer) // 2 // 4096 * 4096)]], offset)

    return PoolEngine(2, preadv)


@pytest.mark.parametrize("count", [1, 32])
def test_a_row_that_cannot_be_read_fails_the_step_and_not_the_next(model, open_store, count):
    faults = []
    engine = failing_engine(lambda: faults.pop() if faults else None)
    resident = model.resident(ONE_TOKEN, open_store("pack", engine))
    x = tokens(count, 4)
    faults.append(errno.EIO)
    model.step(resident, x)
    assert resident.failure is not None
    assert resident.failure.kind is PackErrorKind.IO
    resident.check_integrity()
    assert resident.counts.failed == 1
    same(model.step(resident, x), model.alone(x))
    assert resident.failure is None
    resident.check_integrity()


def test_random_steps_under_faults_are_right_or_failed(model, open_store):
    """MOET_STEPS sets the number of steps; the tables are checked after every one of them."""
    steps = int(os.environ.get("MOET_STEPS", "600"))
    choose = random.Random(1)
    torch.manual_seed(1)
    inputs = [tokens(count, seed) for seed, count in enumerate([1] * 24 + [2] * 8 + [24] * 4)]
    answers = [model.alone(x) for x in inputs]
    trouble = {"level": 0.0}

    def plan():
        if choose.random() >= trouble["level"]:
            return None
        return choose.choice([errno.EIO, errno.EIO, errno.EAGAIN, errno.EINTR, -1])

    failed = right_after_failure = 0
    previous_failed = False
    resident = store = None
    for number in range(steps):
        if number % 50 == 0:
            kind = choose.choice(["pack", "arena", "large arena", "pinned"])
            store = open_store(kind, None if kind == "pinned" else failing_engine(plan))
            slots = choose.randint(EXPERTS, ALL)
            ring = choose.choice([2, 4, 6])
            resident = model.resident(slots, store, ring=ring)
            if choose.random() < 0.5:
                with_looks(resident)
        trouble["level"] = choose.choice([0.0, 0.0, 0.1, 0.5])
        which = choose.randrange(len(inputs))
        got = model.step(resident, inputs[which])
        if resident.failure is None:
            same(got, answers[which])
            right_after_failure += previous_failed
        else:
            failed += 1
        previous_failed = resident.failure is not None
        trouble["level"] = 0.0
        resident.check_integrity()
        if hasattr(store, "check_integrity"):
            store.check_integrity()
    assert failed > steps // 50, f"only {failed} steps of {steps} failed"
    assert right_after_failure > failed // 4


def with_looks(resident):
    """Let a pool show some marks before it returns all of them, as on a GPU; return their list."""
    take, looks = resident.pool.take_wanted, []

    def take_after_looks(look=None):
        marks = take()
        if look is not None:
            for layers in (1, 2, 3):
                some = marks.copy()
                some[layers:] = False
                look(some)
                looks.append(some)
        return marks

    resident.pool.take_wanted = take_after_looks
    return looks


@pytest.mark.parametrize("kind", ["pack", "arena", "large arena"])
def test_looks_at_a_pass_that_still_runs_change_no_bits(model, open_store, kind):
    store = open_store(kind)
    resident = model.resident(ALL // 2, store)
    looks = with_looks(resident)
    for seed in range(30):
        x = tokens([1, 1, 2, 1, 3, 16][seed % 6], seed)
        same(model.step(resident, x), model.alone(x))
        resident.check_integrity()
        store.check_integrity()
    assert len(looks) == 3 * (resident.counts.passes - resident.counts.streamed)


def test_a_look_starts_what_is_absent_once(model, open_store):
    store = open_store("large arena")
    resident = model.resident(ALL // 2, store)
    resident.preload([(MODEL_LAYERS[0], 0)])
    asked = []
    start = store.start
    store.start = lambda keys: (asked.append(keys), start(keys))
    marks = torch.zeros(len(MODEL_LAYERS), EXPERTS, dtype=bool).numpy()
    marks[0, :3] = True
    resident._look(marks)
    marks[1, 4] = True
    resident._look(marks)
    resident._look(marks)
    first, second = MODEL_LAYERS[:2]
    assert asked == [[(first, 1), (first, 2)], [(second, 4)], []]
    assert "absent" not in store.states([(first, 1), (first, 2), (second, 4)])


def test_a_failure_of_another_rank_ends_the_step_here_too(model, open_store):
    reports = []

    def agree(value):
        reports.append(value)
        return module.FAIL if len(reports) == 1 else value

    resident = model.resident(ONE_TOKEN, open_store("pinned"), agree=agree)
    model.step(resident, tokens(1, 0))
    assert isinstance(resident.failure, MoetError)
    assert "Another rank" in str(resident.failure)
    model.step(resident, tokens(1, 0))
    assert resident.failure is None


def test_ranks_repeat_a_pass_as_long_as_one_of_them_misses(model, open_store):
    resident = model.resident(ALL, open_store("pinned"), agree=lambda value: max(value, 1))
    resident.preload([(layer, expert) for layer in MODEL_LAYERS for expert in range(EXPERTS)])
    with pytest.raises(MoetError, match="still misses experts after 6 passes over 4 layers"):
        model.step(resident, tokens(1, 0))


def test_tolerance_accepts_a_step_and_says_what_it_lacks(model, open_store):
    resident = model.resident(ONE_TOKEN, open_store("pinned"), tolerance=ONE_TOKEN)
    x = tokens(1, 0)
    got = model.step(resident, x)
    assert resident.lacking == ONE_TOKEN
    assert resident.counts.degraded == resident.counts.passes == 1
    assert not torch.equal(got, model.alone(x))
    for _ in range(20):
        got = model.step(resident, x)
    assert resident.lacking == 0, "what steps lack is promoted between them"
    same(got, model.alone(x))


def test_damage_in_a_slot_is_found(model, open_store):
    resident = model.resident(ALL, open_store("pinned"))
    model.step(resident, tokens(1, 0))
    (key, *_) = resident.policy.hottest()
    resident.pool.rows[resident.policy.slot_of[key], 100] ^= 1
    layer, expert = MODEL_LAYERS[key[0]], key[1]
    with pytest.raises(MoetError, match=f"wanted expert {expert} of layer {layer} in slot"):
        resident.check_integrity()
