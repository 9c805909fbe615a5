"""Runs transcripts through vLLM's own path of parsers, whole and as a stream."""

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from parsers.corpus.case import TOOLS, Case, Want
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

from moet_vllm.parsers import family

__all__ = ["STREAMS", "Answer", "passes", "streamed", "whole"]

# How many tokens arrive at once: one, as a server sends them; several, as speculative decoding
# makes them.
STREAMS = (1, 3)

MARKERS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|assistant|>", "<|im_middle|>"),
    *("<|observation|>", "<｜Assistant｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜end▁of▁sentence｜>", "｜DSML｜"),
)
_TOKEN = re.compile("|".join([*map(re.escape, MARKERS), r"\s*\w{1,5}", r"."]), re.DOTALL)


class Tokens:
    """A tokenizer: markers are one token each, other text is cut into short words."""

    def __init__(self) -> None:
        self._ids = {text: i for i, text in enumerate(MARKERS)}

    # The names are those of the tokenizers vLLM uses.
    def get_vocab(self) -> dict[str, int]:
        return self._ids

    def pieces(self, text: str) -> list[str]:
        return _TOKEN.findall(text)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self._ids.setdefault(piece, len(self._ids)) for piece in self.pieces(text)]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        texts = list(self._ids)
        return "".join(texts[i] for i in ids)

    def convert_ids_to_tokens(self, ids: Sequence[int], **_: Any) -> list[str]:
        texts = list(self._ids)
        return [texts[i] for i in ids]

    @property
    def all_special_tokens(self) -> list[str]:
        return list(MARKERS)

    @property
    def all_special_ids(self) -> list[int]:
        return list(range(len(MARKERS)))

    @property
    def vocab(self) -> dict[str, int]:
        return self._ids


class Answer(msgspec.Struct, frozen=True):
    """What a client gets."""

    reasoning: str
    content: str
    calls: tuple[Want, ...]


def _request(case: Case) -> ChatCompletionRequest:
    kind = case.choice.kind
    named = {"type": "function", "function": {"name": case.choice.name}}
    return ChatCompletionRequest(
        messages=[{"role": "user", "content": "x"}],
        model="m",
        tools=TOOLS,
        tool_choice=named if kind == "named" else kind,
    )


def _parser(names: tuple[str, str], case: Case, tokens: Tokens) -> tuple[Any, list[int]]:
    tool, reasoning = names
    cls = ParserManager.get_parser(tool, reasoning, enable_auto_tools=True)
    assert cls is not None
    on = case.thinking != "off"
    settings = {"thinking": on, "enable_thinking": on}
    opening = {"prompt": "<think>", "model": "", "off": "</think>"}[case.thinking]
    prompt = family(case.family).turn + opening
    request = _request(case)
    return cls(tokens, request.tools, chat_template_kwargs=settings), tokens.encode(prompt)


def whole(names: tuple[str, str], case: Case) -> Answer:
    """Read a transcript at once, by the parsers of these names."""
    tokens = Tokens()
    parser, prompt = _parser(names, case, tokens)
    parser.is_reasoning_end(prompt)  # as the server does
    reasoning, content, calls = parser.parse(
        case.text,
        _request(case),
        enable_auto_tools=True,
        model_output_token_ids=tokens.encode(case.text),
    )
    found = tuple(Want(call.name, call.arguments) for call in calls or ())
    return Answer(reasoning or "", content or "", found)


def streamed(names: tuple[str, str], case: Case, at_once: int) -> Answer:
    """Read a transcript as a stream of `at_once` tokens a delta."""
    tokens = Tokens()
    parser, prompt = _parser(names, case, tokens)
    request = _request(case)
    pieces = tokens.pieces(case.text)
    texts: dict[str, str] = {"reasoning": "", "content": ""}
    calls: dict[int, dict[str, str]] = {}
    for at in range(0, len(pieces), at_once):
        some = pieces[at : at + at_once]
        delta = parser.parse_delta(
            "".join(some),
            tokens.encode("".join(some)),
            request,
            prompt_token_ids=prompt,
            finished=at + at_once >= len(pieces),
        )
        if delta is None:
            continue
        texts["reasoning"] += delta.reasoning or ""
        texts["content"] += delta.content or ""
        for piece in delta.tool_calls:
            call = calls.setdefault(piece.index, {"name": "", "arguments": ""})
            if piece.function is not None:
                call["name"] += piece.function.name or ""
                call["arguments"] += piece.function.arguments or ""
    found = tuple(Want(call["name"], call["arguments"]) for _, call in sorted(calls.items()))
    return Answer(texts["reasoning"], texts["content"], found)


def passes(case: Case, answer: Answer) -> bool:
    """Whether an answer is right, blanks around texts and the layout of JSON apart."""
    if answer.reasoning.strip() != case.reasoning.strip():
        return False
    if answer.content.strip() != case.content.strip() or len(answer.calls) != len(case.calls):
        return False
    return all(map(_same, answer.calls, case.calls))


def _same(found: Want, wanted: Want) -> bool:
    if found.name != wanted.name:
        return False
    if not wanted.complete:
        # Half a call: what was written of it, or an error a client sees; never a whole call.
        return not _is_json(found.arguments)
    return _is_json(found.arguments) and json.loads(found.arguments) == json.loads(wanted.arguments)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
