"""The effort of DeepSeek-V4 is what its checkpoint says."""

import pytest

from moet_core.errors import ConfigError
from moet_vllm.parsers.effort import Efforts, asked_to_think, effort_of, read_efforts

LATER = """
import json
HARD: str = (
    "Think hard.\\n"
    "Very.\\n\\n"
)
REASONING_EFFORT_PROMPTS = {"low": "", "high": HARD, "max": "Think — harder."}
DEFAULT_REASONING_EFFORT = "low"
TASKS = set(json.loads("[]"))
"""
PREVIEW = 'REASONING_EFFORT_MAX = ("Think " "hard.")'


def test_a_later_encoder_has_three_texts() -> None:
    found = read_efforts(LATER)
    assert found == Efforts("", "Think hard.\nVery.\n\n", "Think — harder.", "low")
    assert [found.text(e) for e in ("high", "max", None)] == [found.high, found.max, ""]


def test_the_preview_has_one() -> None:
    assert read_efforts(PREVIEW) == Efforts("", "", "Think hard.", "high")


def test_an_encoder_is_not_run() -> None:
    assert read_efforts(f"raise SystemExit(3)\n{PREVIEW}").max == "Think hard."


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("", "found neither"),
        ("def (", "cannot be parsed"),
        ("REASONING_EFFORT_PROMPTS = {'low': ''}", "found neither"),
        (LATER.replace('FFORT = "low"', 'FFORT = "lots"'), "'lots'"),
        (LATER.replace("HARD: str", "EASY: str"), "found neither"),
        ("REASONING_EFFORT_MAX = make()", "found neither"),
    ],
)
def test_an_encoder_of_another_kind_is_refused(source: str, found: str) -> None:
    with pytest.raises(ConfigError, match=found) as error:
        read_efforts(source, "model/encoder.py")
    assert str(error.value).startswith("model/encoder.py: wanted ")


@pytest.mark.parametrize(
    ("asked", "effort"),
    [
        (None, None),
        ("none", None),
        ("minimal", "low"),
        ("low", "low"),
        ("medium", "high"),
        ("high", "high"),
        ("xhigh", "max"),
        ("max", "max"),
    ],
)
def test_every_name_of_an_effort_is_one_of_three(asked: str | None, effort: str | None) -> None:
    assert effort_of(asked) == effort


@pytest.mark.parametrize("asked", ["ultra", "", 75])
def test_another_name_is_the_clients_mistake(asked: object) -> None:
    with pytest.raises(ValueError, match="reasoning_effort: wanted one of none, minimal"):
        effort_of(asked)


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, None),
        ({"thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none", "thinking": True}, False),
        # vLLM adds enable_thinking to a request with an effort.
        ({"reasoning_effort": "max", "enable_thinking": True, "thinking": False}, False),
        ({"reasoning_effort": "max", "enable_thinking": False}, False),
    ],
)
def test_a_request_asks_to_think(settings: dict[str, object], asked: bool | None) -> None:
    assert asked_to_think(settings) is asked
