"""The plugin's settings: strict, and errors name the key and what is allowed."""

import pytest

from moet_core.errors import ConfigError
from moet_vllm.config import MoetConfig, parse_config


def test_no_settings_give_the_defaults() -> None:
    assert parse_config({}) == MoetConfig(experts="w2", zeros="auto")


def test_settings_are_taken() -> None:
    assert parse_config({"zeros": "sign"}).zeros == "sign"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"zeross": "sign"}, "zeross"),
        ({"zeros": "maybe"}, "maybe"),
        ({"experts": "w3"}, "w3"),
        ({"zeros": 1}, "zeros"),
    ],
)
def test_what_is_wrong_is_named_with_the_known_settings(
    settings: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as error:
        parse_config(settings)
    assert "experts, zeros" in str(error.value)
