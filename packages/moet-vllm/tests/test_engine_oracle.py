"""The comparison of answers can fail, and says where."""

from typing import Any

from engine_oracle import compare


def answer(*steps: tuple[int, dict[int, float]]) -> dict[str, Any]:
    return {
        "tokens": [token for token, _ in steps],
        "logprobs": [{str(t): p for t, p in logprobs.items()} for _, logprobs in steps],
    }


CLEAR = {1: -0.5, 2: -1.5}
TIE = {1: -1.00, 2: -1.04}


def test_equal_answers_have_no_faults() -> None:
    same = [answer((1, CLEAR), (1, TIE))]
    found = compare(same, same)
    assert (found.faults, found.compared, found.largest) == ([], 2, 0.0)


def test_another_token_without_a_near_tie_is_a_fault() -> None:
    found = compare([answer((1, CLEAR))], [answer((2, CLEAR))])
    assert found.faults == ["prompt 0, position 0: wanted token 1, got 2, no near tie"]


def test_a_token_outside_the_reported_ones_is_a_fault() -> None:
    assert compare([answer((1, CLEAR))], [answer((7, {7: -0.1}))]).faults


def test_after_a_near_tie_the_rest_is_not_compared() -> None:
    wanted = [answer((1, CLEAR), (1, TIE), (1, CLEAR))]
    got = [answer((1, CLEAR), (2, TIE), (2, CLEAR))]
    found = compare(wanted, got)
    assert (found.faults, found.compared) == ([], 1)
    assert found.near_ties == ["prompt 0, position 1: 1 over 2 by 0.0400 nat"]


def test_a_log_probability_beyond_the_tolerance_is_a_fault() -> None:
    found = compare([answer((1, CLEAR))], [answer((1, {1: -0.53}))])
    assert found.faults == ["prompt 0, position 0: log probability differs by 0.0300"]
