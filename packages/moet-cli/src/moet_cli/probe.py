"""Asks a server over HTTP whether it is up and whether it can take a step."""

import os
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any, TypeVar

import msgspec

from moet_core.errors import MoetError

__all__ = ["ProbeError", "first_token", "is_healthy", "model_name"]

T = TypeVar("T")

HEALTH_SECONDS = 2.0
# A loopback address must not go through the proxy that the environment may name.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ProbeError(MoetError):
    """The server answered something else than it should, or not at all."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Completion(msgspec.Struct):
    usage: _Usage


def is_healthy(url: str) -> bool:
    """Tell whether the server says that it is up, which does not mean that it can compute."""
    try:
        with _DIRECT.open(f"{url}/health", timeout=HEALTH_SECONDS) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):
        return False


def model_name(url: str, timeout: float) -> str:
    """Return the name under which the server knows its model.

    Raises:
        ProbeError: it has none.
    """
    models = _ask(f"{url}/v1/models", None, _Models, timeout).data
    if not models:
        raise ProbeError(f"{url} serves no model.")
    return models[0].id


def first_token(url: str, timeout: float) -> None:
    """Have the server take a real forward step.

    Raises:
        ProbeError: it failed, or answered without a token.
    """
    request = {"model": model_name(url, timeout), "prompt": "1", "max_tokens": 1}
    found = _ask(f"{url}/v1/completions", request, _Completion, timeout)
    if found.usage.completion_tokens != 1:
        raise ProbeError(f"{url} answered without a token: {found}.")


def _ask(url: str, body: dict[str, Any] | None, wanted: type[T], timeout: float) -> T:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("VLLM_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else msgspec.json.encode(body)
    request = urllib.request.Request(url, data, headers)  # noqa: S310 - the address is ours
    try:
        with _DIRECT.open(request, timeout=timeout) as answer:
            return msgspec.json.decode(answer.read(), type=wanted)
    except urllib.error.HTTPError as error:
        with error:
            text = error.read().decode(errors="replace")
        raise ProbeError(f"{url} answered HTTP {error.code}: {text[:500]}") from error
    except (OSError, HTTPException) as error:
        raise ProbeError(f"{url} did not answer: {error}.") from error
    except msgspec.DecodeError as error:
        raise ProbeError(f"{url} does not answer as vLLM does: {error}.") from error
