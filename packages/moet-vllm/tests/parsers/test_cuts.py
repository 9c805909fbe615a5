"""The corpus: every transcript gives what it should, however its stream is cut."""

import random

import pytest
from parsers.corpus.case import Case, outcome, wanted
from parsers.corpus.cases import CASES
from parsers.cutting import assert_sound_stream, bunched, events_of, message_of, token_like

MAX_EXHAUSTIVE = 48
SAMPLED_PAIRS = 24

everywhere = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_the_corpus_is_large_and_has_no_double() -> None:
    assert len(CASES) >= 300
    assert len({case.name for case in CASES}) == len(CASES)
    assert len({(case.family, case.text, case.choice, case.thinking) for case in CASES}) == len(
        CASES
    )


@everywhere
def test_whole(case: Case) -> None:
    events = events_of(case, [case.text])
    assert outcome(message_of(case, [case.text])) == wanted(case)
    assert_sound_stream(case, events)


@everywhere
def test_character_by_character(case: Case) -> None:
    events = events_of(case, case.text)
    assert outcome(message_of(case, case.text)) == wanted(case)
    assert_sound_stream(case, events)


@everywhere
def test_every_single_cut(case: Case) -> None:
    text = case.text
    for cut in range(1, len(text)):
        assert outcome(message_of(case, [text[:cut], text[cut:]])) == wanted(case), cut


@everywhere
def test_two_cuts(case: Case) -> None:
    """All pairs of a short transcript, some of a long one; bench/parsers/cuts.py does all."""
    text, pick = case.text, random.Random(case.name)
    pairs = [(i, j) for j in range(2, min(len(text), MAX_EXHAUSTIVE)) for i in range(1, j)]
    if len(text) > MAX_EXHAUSTIVE:
        pairs = [sorted(pick.sample(range(1, len(text)), 2)) for _ in range(SAMPLED_PAIRS)]
    for i, j in pairs:
        found = outcome(message_of(case, [text[:i], text[i:j], text[j:]]))
        assert found == wanted(case), (i, j)


@everywhere
def test_cuts_of_tokens(case: Case) -> None:
    for seed in range(4):
        assert outcome(message_of(case, token_like(case.text, seed))) == wanted(case), seed


@everywhere
def test_several_markers_in_one_delta(case: Case) -> None:
    for seed in range(4):
        assert outcome(message_of(case, bunched(case.text, seed))) == wanted(case), seed


@everywhere
def test_empty_deltas_change_nothing(case: Case) -> None:
    pieces = [piece for char in case.text for piece in ("", char, "")]
    assert outcome(message_of(case, pieces)) == wanted(case)
