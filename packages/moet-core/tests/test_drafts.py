import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet_core.drafts import FIRST_PAUSE, LONGEST_PAUSE, SETTLE, WINDOW, DraftSwitch


def run(switch, steps, seconds, tokens, lag=0):
    """Run steps that take `seconds` and give `tokens`, by way; return how each of them ran."""
    ways, pending = [], []
    for _ in range(steps):
        pending.append(switch.wanted)
        if len(pending) > lag:
            way = pending.pop(0)
            ways.append(way)
            switch.step_ended(way, seconds[way], tokens[way])
    return ways


TOKENS = {"drafts": 1.8, "none": 1.0}
CHEAP = {"drafts": 1.1, "none": 1.0}
DEAR = {"drafts": 3.0, "none": 1.0}


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_drafts_that_pay_stay_and_others_are_suspended(lag):
    for seconds, way in ((CHEAP, "drafts"), (DEAR, "none")):
        switch = DraftSwitch()
        run(switch, 4 * FIRST_PAUSE, seconds, TOKENS, lag)
        assert switch.way == way
        assert switch.changes == (way == "none")
        assert switch.cost == pytest.approx({way: seconds[way] / TOKENS[way] for way in TOKENS})


def test_suspended_drafts_come_back_when_they_pay_again():
    switch = DraftSwitch()
    run(switch, 2 * FIRST_PAUSE, DEAR, TOKENS)
    assert switch.way == "none"
    run(switch, 3 * FIRST_PAUSE, CHEAP, TOKENS)
    assert switch.way == "drafts"
    assert switch.changes == 2


def test_a_small_advantage_changes_nothing():
    switch = DraftSwitch()
    run(switch, 20 * FIRST_PAUSE, {"drafts": 1.9, "none": 1.0}, TOKENS)
    assert switch.changes == 0


def test_noise_does_not_make_it_swing():
    noise = random.Random(1)
    switch = DraftSwitch()
    for _ in range(100 * FIRST_PAUSE):
        way = switch.wanted
        switch.step_ended(way, TOKENS[way] * noise.uniform(0.8, 1.2), TOKENS[way])
    assert switch.changes <= 1


def test_trials_become_rare_while_they_change_nothing():
    switch = DraftSwitch()
    steps = 50 * LONGEST_PAUSE
    ways = run(switch, steps, CHEAP, TOKENS)
    trial = SETTLE + WINDOW
    assert ways.count("none") % trial == 0
    assert 50 <= ways.count("none") / trial <= 58
    first = ways.index("none")
    assert first == FIRST_PAUSE
    assert ways.index("none", first + trial) - first - trial == 2 * FIRST_PAUSE


def test_what_settles_after_a_change_is_not_measured():
    switch = DraftSwitch()
    run(switch, FIRST_PAUSE, CHEAP, TOKENS)
    for number in range(SETTLE + WINDOW):
        assert switch.wanted == "none"
        switch.step_ended("none", 100.0 if number < SETTLE else 1.0, 1.0)
    assert switch.cost["none"] == 1.0


@given(st.lists(st.tuples(st.sampled_from(["drafts", "none"]), st.floats(0, 9), st.floats(0, 4))))
def test_any_steps_leave_it_with_a_way(steps):
    switch = DraftSwitch()
    for step in steps * 40:
        switch.step_ended(*step)
    assert switch.wanted in ("drafts", "none")
