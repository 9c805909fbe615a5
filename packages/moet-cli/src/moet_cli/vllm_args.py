"""Reads the arguments after `--`, which are vLLM's own.

Those that a plan sets as well are taken out, so that the server's command line has each flag once
and the plan can show that the user's value won. All others go to vLLM as they are.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from moet_cli.options import OPTIONS, Option, Target, convert
from moet_core.errors import UsageError

__all__ = ["VllmArguments", "parse_vllm_arguments"]

_ADDITIONAL_CONFIG = "--additional-config"
_SECURE = "moet asks the server for a first token over plain HTTP; put a TLS proxy in front of it."
_REFUSED = {
    "--model": "Name the model as the argument of `moet serve`, or with --set model=...",
    "--api-key": "A command line is visible to every user; set VLLM_API_KEY in the environment.",
    "--uds": "moet asks the server for a first token over TCP; use --host and --port.",
    "--headless": "moet waits for an API server, and a headless engine has none.",
    "--ssl-keyfile": _SECURE,
    "--ssl-certfile": _SECURE,
}


class VllmArguments(msgspec.Struct, frozen=True):
    """The arguments after `--`, sorted out.

    Attributes:
        values: option name to value, of options that the plan knows.
        additional_config: what `--additional-config` holds for other plugins.
        rest: everything else, word by word.
    """

    values: dict[str, Any]
    additional_config: dict[str, Any]
    rest: tuple[str, ...]


def parse_vllm_arguments(words: Sequence[str]) -> VllmArguments:
    """Sort out the arguments after `--`.

    Raises:
        UsageError: a flag that moet cannot serve with, a flag without its value, or a value that
            the option does not take.
    """
    values: dict[str, Any] = {}
    additional_config: dict[str, Any] = {}
    rest: list[str] = []
    flags = _flags()
    queue = iter(words)
    for word in queue:
        flag, equals, text = word.partition("=")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
        given = text if equals else None
        if flag in _REFUSED:
            raise UsageError(f"moet serve does not take {flag} after `--`. {_REFUSED[flag]}")
        if flag.split(".")[0] == _ADDITIONAL_CONFIG:
            additional_config |= _additional_config(flag, given, queue)
        elif flag in flags:
            option, negative = flags[flag]
            values[option.name] = _value(option, flag, negative, given, queue)
        else:
            rest.append(word)
    return VllmArguments(values, additional_config, tuple(rest))


def _flags() -> dict[str, tuple[Option, bool]]:
    """Map every spelling of a flag to its option, and to whether it says no."""
    found = {}
    for option in OPTIONS.values():
        if option.target is Target.FLAG:
            for spelling in (option.key, *option.aliases):
                found[spelling] = (option, False)
            if option.type is bool:
                found["--no-" + option.key.removeprefix("--")] = (option, True)
    return found


def _value(
    option: Option, flag: str, negative: bool, given: str | None, queue: Iterator[str]
) -> Any:
    if option.type is bool:
        if given is not None:
            raise UsageError(f"vLLM's flag {flag} takes no value, got {given!r}.")
        return not negative
    return convert(option, _text(flag, given, queue), text=True)


def _text(flag: str, given: str | None, queue: Iterator[str]) -> str:
    text = given if given is not None else next(queue, None)
    if text is None:
        raise UsageError(f"vLLM's flag {flag} needs a value, and none follows it.")
    return text


def _additional_config(flag: str, given: str | None, queue: Iterator[str]) -> dict[str, Any]:
    if flag != _ADDITIONAL_CONFIG:
        raise UsageError(f"Give {flag} as JSON: {_ADDITIONAL_CONFIG} '{{...}}'.")
    text = _text(flag, given, queue)
    try:
        config = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise UsageError(f"{flag} takes a JSON object, got {text!r}: {error}.") from error
    if "moet" in config:
        raise UsageError(f'{flag} must not hold "moet": set those options with --set key=value.')
    return config
