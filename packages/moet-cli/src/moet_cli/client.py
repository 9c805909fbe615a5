"""Asks a running server through the openai client and times the answer."""

import os
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import openai

from moet_cli.probe import model_name
from moet_core.errors import MoetError

__all__ = ["Answer", "Client", "Reply"]

REQUEST_SECONDS = 600.0


class Answer(msgspec.Struct, frozen=True):
    """One answer; times in seconds since the request was sent."""

    prompt: str
    text: str
    prompt_tokens: int
    completion_tokens: int
    first_token_seconds: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second of the whole request, the prompt's time included.

        Not the rate after the first chunk: a server may send several tokens in one chunk, the
        first one included.
        """
        return self.completion_tokens / self.seconds


class Reply(msgspec.Struct, frozen=True):
    """One message of the assistant: text, or calls as (id, name, arguments in JSON)."""

    text: str
    calls: tuple[tuple[str, str, str], ...] = ()


class Client:
    """An OpenAI client of one server; greedy. Timed answers are as long as asked for.

    Close it, or use it in a `with` statement.
    """

    def __init__(self, url: str) -> None:
        self._openai = openai.OpenAI(
            base_url=f"{url}/v1",
            api_key=os.environ.get("VLLM_API_KEY") or "none",
            timeout=REQUEST_SECONDS,
            max_retries=0,  # a repeated request would be timed as one
            http_client=openai.DefaultHttpxClient(trust_env=False),  # no proxy to our own server
        )
        self._settings: dict[str, Any] = {
            "model": model_name(url, REQUEST_SECONDS),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "extra_body": {"ignore_eos": True},
        }

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._openai.close()

    def complete(self, prompt: str, max_tokens: int) -> Answer:
        """Have a prompt continued."""
        create = self._openai.completions.create
        return _timed(
            prompt, lambda: create(prompt=prompt, max_tokens=max_tokens, **self._settings)
        )

    def chat(self, question: str, max_tokens: int) -> Answer:
        """Ask a question through the chat template."""
        create = self._openai.chat.completions.create
        messages = [{"role": "user", "content": question}]
        return _timed(
            question, lambda: create(messages=messages, max_tokens=max_tokens, **self._settings)
        )

    def converse(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], max_tokens: int
    ) -> Reply:
        """Have the assistant answer, or call tools if it decides to, until it is done.

        Raises:
            MoetError: the server did not answer.
        """
        settings: dict[str, Any] = {"tools": tools, "tool_choice": "auto"} if tools else {}
        try:
            found = self._openai.chat.completions.create(
                model=self._settings["model"],
                temperature=0,
                messages=messages,
                max_tokens=max_tokens,
                **settings,
            )
        except openai.OpenAIError as error:
            raise MoetError(f"The server did not answer a request: {error}.") from error
        message = found.choices[0].message
        calls = [
            (call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls or []
            if call.type == "function"
        ]
        return Reply(message.content or "", tuple(calls))


def _timed(prompt: str, send: Any) -> Answer:
    start = time.monotonic()
    try:
        return _collect(prompt, send(), start)
    except openai.OpenAIError as error:
        raise MoetError(f"The server did not answer a request: {error}.") from error


def _collect(prompt: str, chunks: Iterable[Any], start: float) -> Answer:
    text, usage, first, last = "", None, 0.0, 0.0
    for chunk in chunks:
        usage = chunk.usage or usage
        if chunk.choices:
            last = time.monotonic() - start
            first = first or last
            text += _text(chunk.choices[0])
    if usage is None:
        raise MoetError("The server's answer ended early: it has no token counts.")
    return Answer(prompt, text, usage.prompt_tokens, usage.completion_tokens, first, last)


def _text(choice: Any) -> str:
    if hasattr(choice, "text"):
        return choice.text or ""
    return choice.delta.content or ""
