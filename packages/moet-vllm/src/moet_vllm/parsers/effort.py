"""How hard a DeepSeek-V4 model is told to think, as its checkpoint says it.

An effort is a text at the very beginning of the prompt. Two generations of checkpoints give the
same names to different texts: the preview knows "high", no text, and "max"; from 0731 on "low" is
no text, "high" is what "max" was, and "max" is a text of its own. The texts are therefore read
from the encoder that every checkpoint brings along, without running it.
"""

import ast
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from moet_core.errors import ConfigError

__all__ = ["ENCODER_FILE", "Effort", "Efforts", "asked_to_think", "effort_of", "read_efforts"]

Effort = Literal["low", "high", "max"]

ENCODER_FILE = "encoding/encoding_dsv4.py"

# OpenAI's names, of which the model has three.
_EFFORTS: dict[str, Effort] = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}


class Efforts(msgspec.Struct, frozen=True):
    """What a prompt begins with for each effort; `default` is what a request without one gets."""

    low: str
    high: str
    max: str
    default: Effort

    def text(self, effort: Effort | None) -> str:
        """Return what the prompt of a model that is to think begins with."""
        texts = {"low": self.low, "high": self.high, "max": self.max}
        return texts[effort or self.default]


def read_efforts(source: str, file: str = ENCODER_FILE) -> Efforts:
    """Read the texts of a checkpoint's own encoder.

    Args:
        source: the encoder's Python source; it is parsed, not run.
        file: where it is from, for errors.

    Raises:
        ConfigError: It has neither the texts of 0731 nor that of the preview.
    """
    found = _constants(source, file)
    prompts = found.get("REASONING_EFFORT_PROMPTS")
    if isinstance(prompts, dict) and all(
        isinstance(prompts.get(name), str) for name in ("low", "high", "max")
    ):
        default = found.get("DEFAULT_REASONING_EFFORT")
        if not isinstance(default, str) or default not in ("low", "high", "max"):
            raise ConfigError(
                f"{file}: wanted DEFAULT_REASONING_EFFORT to be low, high or max, found"
                f" {default!r}. Take the file from the model's repository again."
            )
        return Efforts(prompts["low"], prompts["high"], prompts["max"], default)  # type: ignore[arg-type]
    preview = found.get("REASONING_EFFORT_MAX")
    if isinstance(preview, str):
        return Efforts(low="", high="", max=preview, default="high")
    raise ConfigError(
        f"{file}: wanted REASONING_EFFORT_PROMPTS with texts for low, high and max, or"
        " REASONING_EFFORT_MAX; found neither. Is it the encoder of a DeepSeek-V4 checkpoint?"
    )


def effort_of(value: object) -> Effort | None:
    """Return the effort that a request's `reasoning_effort` stands for.

    Returns:
        None for none at all and for "none", which is no effort but no thinking.

    Raises:
        ValueError: Not one of the names; vLLM answers it as the client's mistake.
    """
    if value is None or value == "none":
        return None
    if not isinstance(value, str) or value not in _EFFORTS:
        raise ValueError(
            f"reasoning_effort: wanted one of none, {', '.join(_EFFORTS)}, found {value!r}."
        )
    return _EFFORTS[value]


def asked_to_think(settings: Mapping[str, Any]) -> bool | None:
    """Return what the settings of a chat template say about thinking, None if nothing.

    `thinking` is the model's own name and comes before `enable_thinking`, which vLLM sets by
    itself where a request has an effort. The effort "none" is no thinking, another one is.
    """
    if settings.get("reasoning_effort") == "none":
        return False
    for key in ("thinking", "enable_thinking"):
        if settings.get(key) is not None:
            return bool(settings[key])
    return True if settings.get("reasoning_effort") is not None else None


def _constants(source: str, file: str) -> dict[str, Any]:
    """Read the module's constants; one that is built from others is followed."""
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"{file}: wanted Python source, found what cannot be parsed ({error})."
            " Take the file from the model's repository again."
        ) from None
    found: dict[str, Any] = {}
    for statement in module.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass
            case _:
                continue
        try:
            found[name] = _value(value, found)
        except LookupError:
            found.pop(name, None)
    return found


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return known[name]
        case ast.Dict(keys=keys, values=values) if all(keys):
            return {
                _value(key, known): _value(value, known)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
    raise LookupError(ast.dump(node))
