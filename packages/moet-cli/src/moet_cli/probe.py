"""Asks a server whether it is up and whether it can take a step, with the standard library only."""

import json
import os
import urllib.error
import urllib.request
from typing import Any

from moet_core.errors import MoetError

__all__ = ["ProbeError", "first_token", "is_healthy", "model_name"]

HEALTH_SECONDS = 2.0
# A loopback address must not go through the proxy that the environment may name.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ProbeError(MoetError):
    """The server answered something else than it should, or not at all."""


def is_healthy(url: str) -> bool:
    """Tell whether the server says that it is up, which does not mean that it can compute."""
    try:
        with _DIRECT.open(f"{url}/health", timeout=HEALTH_SECONDS) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def model_name(url: str, timeout: float) -> str:
    """Return the name under which the server knows its model."""
    name: str = _ask(f"{url}/v1/models", None, timeout)["data"][0]["id"]
    return name


def first_token(url: str, timeout: float) -> None:
    """Have the server take a real forward step.

    Raises:
        ProbeError: it failed, or answered without a token.
    """
    request = {"model": model_name(url, timeout), "prompt": "1", "max_tokens": 1}
    usage = _ask(f"{url}/v1/completions", request, timeout)["usage"]
    if usage["completion_tokens"] != 1:
        raise ProbeError(f"The server answered, but without a token: {usage}.")


def _ask(url: str, body: dict[str, Any] | None, timeout: float) -> Any:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("VLLM_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)  # noqa: S310 - the address is ours
    try:
        with _DIRECT.open(request, timeout=timeout) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            text = error.read().decode(errors="replace")
        raise ProbeError(f"{url} answered HTTP {error.code}: {text[:500]}") from error
    except (OSError, ValueError) as error:
        raise ProbeError(f"{url} did not answer: {error}.") from error
