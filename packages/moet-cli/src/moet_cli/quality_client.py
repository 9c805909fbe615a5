"""Asks a server everything that `moet bench quality` compares, and keeps what it said."""

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import openai

from moet_cli.probe import model_name
from moet_core.errors import MoetError
from moet_vllm.tinymoe import Case, HeldOut, Text

__all__ = ["CANDIDATES", "CONCURRENCY", "Answered", "Collected", "Scored", "collect", "is_right"]

CANDIDATES = 40  # most likely tokens that are asked for at each position of a text
CONCURRENCY = 8
MAX_TOKENS = 96
REQUEST_SECONDS = 600.0
END = "<|endoftext|>"  # precedes every file in training


class Answered(msgspec.Struct, frozen=True):
    """A reply to one case."""

    skill: str
    right: bool
    text: str
    tokens: int


class Scored(msgspec.Struct, frozen=True):
    """What a model expects at each position of a text.

    Attributes:
        context: "short" or "2k".
        text_bytes: length of the text.
        actual: log-probability of each token `[T]`.
        ids: most likely tokens `[T][CANDIDATES]`, the likeliest first.
        logprobs: their log-probabilities.
    """

    context: str
    text_bytes: int
    actual: list[float]
    ids: list[list[int]]
    logprobs: list[list[float]]


class Collected(msgspec.Struct, frozen=True):
    """All of a server's replies."""

    answers: list[Answered]
    texts: list[Scored]


def collect(url: str, questions: HeldOut, say: Callable[[str], None]) -> Collected:
    """Ask a running server all questions.

    Raises:
        MoetError: a request failed.
    """
    with openai.OpenAI(
        base_url=f"{url}/v1",
        api_key=os.environ.get("VLLM_API_KEY") or "none",
        timeout=REQUEST_SECONDS,
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as client:
        model = model_name(url, REQUEST_SECONDS)
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            try:
                say(f"{len(questions.texts)} texts")
                texts = list(pool.map(lambda text: _score(client, model, text), questions.texts))
                say(f"{len(questions.cases)} questions")
                answers = list(pool.map(lambda case: _ask(client, model, case), questions.cases))
            except openai.OpenAIError as error:
                raise MoetError(f"The server did not answer a request: {error}.") from error
            finally:
                pool.shutdown(cancel_futures=True)
    return Collected(answers, texts)


def _ask(client: openai.OpenAI, model: str, case: Case) -> Answered:
    settings: dict[str, Any] = {"tools": case.tools, "tool_choice": "auto"} if case.tools else {}
    reply = client.chat.completions.create(
        model=model,
        messages=case.messages,
        temperature=0,
        max_tokens=MAX_TOKENS,
        **settings,
    )
    message = reply.choices[0].message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    text = message.content or ""
    right = is_right(case, text, calls)
    text = json.dumps(calls) if calls and case.call is not None else text
    tokens = reply.usage.completion_tokens if reply.usage else 0
    return Answered(case.skill, right, text, tokens)


def is_right(case: Case, text: str, calls: Sequence[tuple[str, str]]) -> bool:
    """Tell whether a reply is the wanted one, whole: its text, or its one call.

    Args:
        case: the question.
        text: the reply's text outside of calls.
        calls: names and arguments, these as JSON.
    """
    if case.call is not None:
        return len(calls) == 1 and _is_call(calls[0], case.call)
    return not calls and text.strip() == case.answer


def _is_call(found: tuple[str, str], wanted: dict[str, Any]) -> bool:
    """Compare a call with the wanted one: the name, and arguments equal in value and type."""
    name, arguments = found
    try:
        given = json.loads(arguments)
    except ValueError:
        return False
    return name == wanted["name"] and _typed(given) == _typed(wanted["arguments"])


def _typed(arguments: Any) -> Any:
    if not isinstance(arguments, dict):
        return arguments
    return {key: (type(value), value) for key, value in arguments.items()}


def _score(client: openai.OpenAI, model: str, text: Text) -> Scored:
    reply = client.completions.create(
        model=model,
        prompt=END + text.text,
        max_tokens=1,
        temperature=0,
        extra_body={"prompt_logprobs": CANDIDATES, "return_token_ids": True},
    )
    choice: Any = reply.choices[0]
    prompt = choice.prompt_token_ids[1:]
    positions = choice.prompt_logprobs[1:]
    actual, ids, logprobs = [], [], []
    for token, found in zip(prompt, positions, strict=True):
        actual.append(found[str(token)]["logprob"])
        ranked = sorted(found.items(), key=lambda item: item[1]["rank"])[:CANDIDATES]
        ids.append([int(key) for key, _ in ranked])
        logprobs.append([value["logprob"] for _, value in ranked])
    return Scored(text.context, len(text.text.encode()), actual, ids, logprobs)
