"""The simulator counts what plain models of the same caches count."""

import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet_core.simulate import POLICIES, Settings, simulate
from moet_core.traces import RoutingTrace

TEXTBOOK = ("LRU", "LFU", "LFU-decayed", "Belady")
STILL = Settings(promotions=0)


def trace_of(steps, experts, prefill=()):
    """Return a trace of steps, each a list of tokens, each a list of layers, each of experts."""
    ends = np.cumsum([len(step) for step in steps], dtype=np.int64)
    kinds = np.array([index in prefill for index in range(len(steps))])
    tokens = np.array([token for step in steps for token in step], np.uint16)
    return RoutingTrace(tokens, ends, kinds, experts)


def single(sequence, experts=6, prefill=()):
    """Return a trace of one layer, top 1, one token a step."""
    return trace_of([[[[expert]]] for expert in sequence], experts, prefill)


@st.composite
def traces(draw, experts=4, length=7):
    """Draw traces of 2 layers, top 1, of one or two tokens a step."""
    expert = st.integers(0, experts - 1)
    token = st.tuples(*[expert.map(lambda e: [e])] * 2).map(list)
    steps = draw(st.lists(st.lists(token, min_size=1, max_size=2), min_size=1, max_size=length))
    return trace_of(steps, experts)


def wanted_sets(trace):
    return [
        frozenset((layer, int(e)) for token in chosen for layer, es in enumerate(token) for e in es)
        for _, chosen in trace.steps()
    ]


def fewest_misses(trace, slots):
    """Try every choice of what stays."""
    steps = wanted_sets(trace)

    @cache
    def best(index, held):
        if index == len(steps):
            return 0
        wanted = steps[index]
        pinned = wanted if len(wanted) <= slots else frozenset()
        rest = (held | wanted) - pinned
        count = min(slots - len(pinned), len(rest))
        followers = (pinned | set(kept) for kept in itertools.combinations(sorted(rest), count))
        return len(wanted - held) + min(best(index + 1, frozenset(f)) for f in followers)

    return best(0, frozenset())


@given(traces(), st.integers(1, 6))
def test_belady_is_the_optimum(trace, slots):
    optimum = fewest_misses(trace, slots)
    found = {name: simulate(trace, slots, name, STILL).misses for name in TEXTBOOK}
    assert found["Belady"] == optimum
    assert min(found.values()) == optimum


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(1, 5))
def test_lru_is_a_list_in_the_order_of_use(sequence, slots):
    held, hits = [], 0
    for expert in sequence:
        hits += expert in held
        held = [expert, *(e for e in held if e != expert)][:slots]
    assert simulate(single(sequence), slots, "LRU", STILL).hits == hits


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(1, 5))
def test_lfu_keeps_the_most_counted(sequence, slots):
    held, counts, last, hits = set(), [0] * 6, [0] * 6, 0
    for step, expert in enumerate(sequence, 1):
        hits += expert in held
        counts[expert] += 1
        last[expert] = step
        if expert not in held and len(held) == slots:
            held.remove(min(held, key=lambda e: (counts[e], last[e], -e)))
        held.add(expert)
    assert simulate(single(sequence), slots, "LFU", STILL).hits == hits


def test_decay_forgets_what_was_counted_long_ago():
    # Expert 0 was used ten times, then 1 and 2 in turns: plain LFU keeps 0 in one of two slots.
    trace = single([0] * 10 + [1, 2] * 8)
    hits = {
        name: simulate(trace, 2, name, Settings(half_life=2, promotions=0)).hits - 9
        for name in ("LFU", "LFU-decayed", "moet")
    }
    assert hits["LFU"] == 0
    assert hits["LFU-decayed"] == hits["moet"] >= 10


@given(traces(length=12), st.integers(4, 8))
def test_without_promotions_moet_is_the_decayed_lfu(trace, slots):
    # From 4 slots on every step of two tokens fits, so that nothing is streamed.
    found = [simulate(trace, slots, name, STILL) for name in ("moet", "LFU-decayed")]
    assert found[0] == found[1]


class TestCounts:
    TWO = trace_of([[[[0, 1]], [[0, 2]]], [[[0, 1]], [[3, 1]]]], 4)

    @pytest.mark.parametrize("policy", POLICIES)
    def test_routings_of_every_token_and_experts_once(self, policy):
        found = simulate(self.TWO, 4, policy, STILL)
        assert (found.steps, found.routings) == (2, 8)
        # The second step's four routings are 0, 1, 3, 1; all but 3 were brought by the first.
        assert (found.hits, found.misses, found.moved) == (3, 4, 4)
        assert (found.clean, found.streamed, found.repaired) == (0, 0, 1.0)
        assert found.hit_rate == 3 / 8

    @pytest.mark.parametrize("policy", POLICIES)
    def test_a_step_that_finds_everything_is_clean(self, policy):
        found = simulate(single([2, 2, 2, 4]), 1, policy, STILL)
        assert (found.clean, found.misses, found.repaired) == (2, 2, 0.5)

    @pytest.mark.parametrize("policy", POLICIES)
    def test_the_whole_model_misses_each_expert_once(self, policy):
        rng = np.random.default_rng(5)
        found = simulate(single(rng.integers(0, 6, 300).tolist()), 6, policy, Settings())
        assert (found.misses, found.moved) == (6, 6)

    @pytest.mark.parametrize("policy", POLICIES)
    def test_what_a_prompt_wanted_does_not_enter(self, policy):
        found = simulate(single([0, 0, 1, 0], prefill={0, 1}), 2, policy, STILL)
        assert (found.steps, found.misses, found.hits) == (2, 2, 0)

    @pytest.mark.parametrize("policy", POLICIES)
    def test_a_pool_below_a_step_s_worst_case_streams(self, policy):
        found = simulate(self.TWO, 3, policy, STILL)
        assert (found.streamed, found.repaired) == (2, 0.0)

    def test_a_streamed_step_enters_by_promotion_alone(self):
        found = simulate(trace_of([[[[0, 1]]]] * 4, 4), 1, "moet", Settings(promotions=1))
        # Ordered after the first step, under way during the second, there for the third.
        assert (found.hits, found.moved, found.streamed) == (2, 1, 4)

    def test_streamed_decode_steps_count_as_use(self):
        steps = [[[[expert]], [[expert]]] for expert in [0] * 3 + [1] * 9]
        found = simulate(trace_of(steps, 4), 1, "moet", Settings())
        assert (found.moved, found.clean) == (2, 5)

    def test_a_step_that_finds_everything_is_not_streamed(self):
        # Two tokens could need two experts, but both need the same one.
        found = simulate(trace_of([[[[0]], [[0]]]] * 5, 4), 1, "moet", Settings())
        assert (found.clean, found.streamed, found.repaired) == (3, 2, 0.0)


class TestPromotions:
    def test_prompts_fill_an_empty_pool(self):
        found = simulate(single([0, 5, 0], prefill={0, 1}), 2, "moet", Settings())
        assert (found.hits, found.moved) == (1, 2)

    def test_prompts_that_count_evict(self):
        sequence = [0] + [1] * 9 + [0]
        kinds = set(range(1, 10))
        found = [
            simulate(single(sequence, prefill=kinds), 1, "moet", Settings(count_prompts=count))
            for count in (False, True)
        ]
        assert [f.hits for f in found] == [1, 0]

    def test_a_step_that_needs_their_slots_waits_for_them(self):
        # One slot, taken by a promotion that is under way when another expert is wanted.
        found = simulate(single([0, 1, 1, 0], prefill={0}), 1, "moet", Settings())
        assert (found.hits, found.misses, found.moved) == (1, 2, 3)

    def test_never_more_than_asked_for(self):
        trace = trace_of([[[[0]], [[1]], [[2]], [[3]]], [[[0]]], [[[0]]]], 4, prefill={0})
        moved = [simulate(trace, 4, "moet", Settings(promotions=n)).moved for n in (0, 1, 4)]
        assert moved == [1, 3, 4]


@pytest.mark.parametrize(
    ("policy", "slots", "prefill"), [("FIFO", 1, ()), ("LRU", 0, ()), ("LRU", 1, {0})]
)
def test_what_cannot_be_simulated(policy, slots, prefill):
    with pytest.raises(ValueError, match=r"wanted a policy of moet, LRU, .* got"):
        simulate(single([0], prefill=prefill), slots, policy, STILL)
