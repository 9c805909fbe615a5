import math

import pytest

from moet_cli.plan import resolve
from moet_cli.quality import _of_others, compare, serving_settings
from moet_cli.quality_client import Answered, Collected, Scored, _is_call
from moet_vllm.tinymoe import held_out


def collected(right, tokens, p):
    answers = [Answered("needle", value, "a" * 30, tokens) for value in right]
    first, second = math.log(p), math.log(1 - p)
    order = [1, 2] if p > 0.5 else [2, 1]
    scores = [first, second] if p > 0.5 else [second, first]
    texts = [Scored(c, 2, [first], [order], [scores]) for c in ("short", "2k")]
    return Collected(answers, texts)


@pytest.fixture
def figures():
    measured = compare(collected([True, False], 6, 0.25), collected([True, True], 4, 0.75))
    return {found.name: found.median for found in measured}


def test_a_skill_is_the_share_of_right_replies(figures):
    assert figures["skills.needle"] == 0.5


def test_kl_and_agreement_are_against_the_reference(figures):
    assert figures["kl"] == pytest.approx(0.5 * math.log(3))
    assert figures["top1_agreement"] == 0
    assert figures["bits_per_byte"] == pytest.approx(1)


def test_inflation_is_tokens_over_the_references(figures):
    assert figures["inflation"] == 1.5
    assert figures["loop_rate"] == 1


@pytest.mark.parametrize(
    ("arguments", "same"),
    [('{"n": 1}', True), ('{"n": 1.0}', False), ('{"n": "1"}', False), ("{}", False), ("{", False)],
)
def test_arguments_must_match_in_value_and_type(arguments, same):
    assert _is_call(("f", arguments), {"name": "f", "arguments": {"n": 1}}) is same


def test_the_users_settings_come_last():
    plan = resolve("demo", serving_settings(["max_logprobs=3"]))
    assert plan["max_logprobs"] == 3
    assert plan["tool_call_parser"] == "moet_glm47"


def test_the_held_out_sets_hold_every_skill():
    questions = held_out()
    skills = [case.skill for case in questions.cases]
    assert {s: skills.count(s) for s in set(skills)} == {
        "arithmetic": 200,
        "needle": 60,
        "tool_calls": 150,
        "chat": 60,
    }
    assert {text.context for text in questions.texts} == {"short", "2k"}


def test_the_checkpoints_own_server_gets_no_settings_of_2_bit_experts():
    settings = ["port=9", "fine=0.5", "gate=max_prob", "tau=0.6", "pool=1", "max_num_seqs=2"]
    assert _of_others(settings) == ["port=9", "max_num_seqs=2"]
