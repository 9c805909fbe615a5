import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet_core.errors import ConfigError
from moet_core.gate import (
    Gate,
    GateChange,
    GateSettings,
    Reading,
    changed,
    confidence,
    emitted_rows,
    options,
)


def reading(values, tokens=None, counts=None):
    values = np.array(values, np.float64)
    tokens = np.arange(len(values)) if tokens is None else np.array(tokens)
    counts = np.ones(len(values), bool) if counts is None else np.array(counts)
    return Reading(values, tokens, counts)


def gate(**settings):
    return Gate(GateSettings(**settings))


@given(st.lists(st.floats(-30, 30), min_size=2, max_size=9))
def test_signals_are_those_of_the_softmax(logits):
    logits = np.array(logits)
    probabilities = np.exp(logits) / np.exp(logits).sum()
    ordered = np.sort(logits)[::-1]
    parts = (ordered[:1], ordered[1:2], np.log(np.exp(logits).sum(keepdims=True)))
    assert confidence("max_prob", *parts) == pytest.approx(probabilities.max(), rel=1e-9)
    assert confidence("margin", *parts) == pytest.approx(ordered[0] - ordered[1])


def test_rounding_gives_no_probability_above_one():
    one = np.array([1.0], np.float32)
    assert confidence("max_prob", one, one, one - 1e-3) == 1.0


def test_the_least_certain_row_decides():
    assert gate(tau=0.6).decide(reading([0.9, 0.61])) == "pass"
    assert gate(tau=0.6).decide(reading([0.9, 0.6])) == "fire"


def test_rows_that_cannot_be_emitted_do_not_decide():
    assert gate(tau=0.6).decide(reading([0.9, 0.1], counts=[True, False])) == "pass"


def test_one_always_fires_and_zero_never():
    certain, torn = reading([1.0]), reading([1e-30])
    assert gate(tau=1.0).decide(certain) == "fire"
    assert gate(tau=0.0).decide(torn) == "pass"


def test_a_row_without_a_number_fires():
    assert gate(tau=0.0).decide(reading([np.nan, 1.0])) == "fire"


def test_a_step_without_rows_passes():
    assert gate(tau=1.0).decide(reading([])) == "pass"


def test_audits_come_with_their_probability_and_only_where_nothing_fires():
    audited = gate(tau=0.5, audit=0.25)
    decisions = [audited.decide(reading([0.9])) for _ in range(4000)]
    assert set(decisions) == {"pass", "audit"}
    assert 900 < decisions.count("audit") < 1100
    assert audited.decide(reading([0.4])) == "fire"
    assert audited.counts.checked == 4001


def test_the_same_seed_audits_the_same_steps():
    runs = [
        [g.decide(reading([1.0])) for _ in range(50)] for g in (gate(audit=0.5), gate(audit=0.5))
    ]
    assert runs[0] == runs[1]


def test_flips_are_counted_by_what_caused_them():
    counted = gate()
    before, same = reading([0.1, 0.9], [5, 6]), reading([0.3, 0.9], [5, 6])
    other = reading([0.3, 0.9], [7, 6])
    counted.ended("fire", before, same, 0.5)
    counted.ended("fire", before, other, 0.25)
    counted.ended("audit", before, other, 0.25)
    hidden = reading([0.1, 0.9], [5, 6], [False, True])
    counted.ended("audit", hidden, other, 0.0)
    counts = counted.counts
    assert (counts.fires, counts.flipped, counts.audits, counts.audit_flipped) == (2, 1, 2, 1)
    assert counts.seconds == 1.0


def test_without_drafts_every_row_counts():
    assert emitted_rows(np.array([3, 4, 5]), [[], [], []]).all()


def test_a_row_counts_as_far_as_the_drafts_are_what_the_rows_say():
    tokens = np.array([7, 8, 9, 4, 1, 2])
    drafts = [[7, 9], [], [1]]  # the second draft of the first request is not 8
    assert emitted_rows(tokens, drafts).tolist() == [True, True, False, True, True, True]
    assert emitted_rows(np.array([7, 8]), [[6]]).tolist() == [True, False]


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=5), st.randoms())
def test_greedy_verification_emits_exactly_the_rows_that_count(drafts, random):
    tokens = np.array([random.randrange(3) for part in drafts for _ in range(len(part) + 1)], int)
    expected, row = [], 0
    for part in drafts:
        alive = True
        for position in range(len(part) + 1):
            expected.append(alive)
            alive = alive and position < len(part) and tokens[row + position] == part[position]
        row += len(part) + 1
    assert emitted_rows(tokens, drafts).tolist() == expected


def test_rows_that_do_not_match_the_drafts_are_an_error():
    with pytest.raises(ValueError, match="wanted 3 rows for 2 requests, got 2"):
        emitted_rows(np.array([1, 2]), [[5], []])


def test_a_change_replaces_what_it_names_and_nothing_else():
    before = GateSettings(signal="margin", tau=2.0, budget=5, passes=1, audit=0.5)
    assert changed(before, GateChange()) == before
    after = changed(before, GateChange(tau=0.0))
    assert after == msgspec.structs.replace(before, tau=0.0)
    assert changed(after, GateChange(gate_budget=0)).budget == 0
    assert options(after) == {"gate": "margin", "tau": 0.0, "gate_budget": 5}


def test_a_probability_above_one_is_refused_and_a_margin_is_not():
    with pytest.raises(ConfigError, match=r"tau=1\.5 is no probability"):
        changed(GateSettings(), GateChange(tau=1.5))
    assert changed(GateSettings(signal="margin"), GateChange(tau=1.5)).tau == 1.5


def test_the_next_decision_follows_the_new_settings():
    changing = gate(tau=0.5)
    assert changing.decide(reading([0.7])) == "pass"
    changing.settings = changed(changing.settings, GateChange(tau=0.7))
    assert changing.decide(reading([0.7])) == "fire"
