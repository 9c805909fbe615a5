"""The parsers inside a real server: every tool_choice, streamed and not, by client and by hand.

TinyMoE makes calls by itself, at its own precision all of its held-out ones. What it would not say
of itself, several calls and malformed ones, is forced by a choice of one reply.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moet_vllm.native import write_bf16_copy
from moet_vllm.parsers import family
from moet_vllm.parsers.history import render_calls
from moet_vllm.tinymoe import CHECKPOINT, held_out

pytestmark = pytest.mark.engine

START_SECONDS = ANSWER_SECONDS = 240  # what a loaded machine may take
TOWNS = ["Oslo", "Rome"]
FORECAST = {
    "type": "function",
    "function": {
        "name": "forecast",
        "description": "Weather of a town",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "enum": TOWNS}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "forecast"}}
ONE = "<tool_call>forecast<arg_key>town</arg_key><arg_value>Oslo</arg_value></tool_call>"
TWO = f"Both. {ONE}{ONE}"


QUESTIONS = [case for case in held_out().cases if case.call is not None][:5]
# Decoded and encoded again, this would be other bytes.
WRITTEN = '{"symbol":"UX570", "days":1e1,"more":{"a":[1,2]}}'


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    model = write_bf16_copy(CHECKPOINT, folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "moet_vllm.server", "serve", str(model)),
        *("--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "bfloat16", "--enforce-eager"),
        *("--max-model-len", "2048", "--max-num-seqs", "4"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "moet_glm47"),
        *("--reasoning-parser", "moet_glm47", "--tokenizer-mode", "moet_glm47"),
        # So small a model would fill a demanded call with the blanks that JSON allows anywhere.
        *("--structured-outputs-config.backend", "xgrammar"),
        *("--structured-outputs-config.disable_any_whitespace", "true"),
    ]
    settings = {
        **os.environ,
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log = folder / "log"
    with log.open("w") as file:
        server = subprocess.Popen(
            command, env=settings, stdout=file, stderr=file, start_new_session=True
        )
    try:
        _wait(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        # One that did not start is gone already; its log says why.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait(health: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(health, timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail("the server did not start: " + log.read_text()[-4000:])


def body(choice: Any, reply: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [FORECAST],
        "tool_choice": choice,
        "max_tokens": 200,
        "temperature": 0,
    }
    if reply is not None:
        found["structured_outputs"] = {"choice": [reply]}
    return found


def by_hand(url: str, request: dict[str, Any], stream: bool) -> tuple[str, list[Any], str]:
    """Ask without a client library; return content, calls (name, arguments) and finish reason."""
    data = json.dumps({**request, "stream": stream}).encode()
    call = urllib.request.Request(
        f"{url}/chat/completions", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(call, timeout=ANSWER_SECONDS) as answer:
        raw = answer.read().decode()
    if not stream:
        return _whole(json.loads(raw))
    lines = [line.removeprefix("data: ") for line in raw.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return _joined([json.loads(line) for line in lines[:-1]])


def by_client(url: str, request: dict[str, Any], stream: bool) -> tuple[str, list[Any], str]:
    """Ask by OpenAI's client."""
    import openai

    standard = {key: value for key, value in request.items() if key != "structured_outputs"}
    extra = {key: value for key, value in request.items() if key == "structured_outputs"}
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        found = client.chat.completions.create(**standard, extra_body=extra, stream=stream)
        if not stream:
            return _whole(found.model_dump())
        return _joined([chunk.model_dump(exclude_unset=True) for chunk in found])


def _whole(answer: dict[str, Any]) -> tuple[str, list[Any], str]:
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = message.get("tool_calls") or []
    assert len({call["id"] for call in calls}) == len(calls)
    functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return message["content"] or "", functions, choice["finish_reason"]


def _joined(chunks: list[dict[str, Any]]) -> tuple[str, list[Any], str]:
    content, reason = "", ""
    calls: list[dict[str, str]] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            reason = choice.get("finish_reason") or reason
            content += choice["delta"].get("content") or ""
            for piece in choice["delta"].get("tool_calls") or ():
                function = piece["function"]
                if piece["index"] == len(calls):
                    assert piece["type"] == "function"
                    calls.append({"id": piece["id"], "name": function["name"], "arguments": ""})
                else:
                    # Only the first delta of a call has its id and name.
                    assert not piece.get("id")
                    assert not function.get("name")
                calls[piece["index"]]["arguments"] += function.get("arguments") or ""
    assert len({call["id"] for call in calls}) == len(calls)
    return content, [(call["name"], call["arguments"]) for call in calls], reason


@pytest.mark.parametrize("ask", [by_hand, by_client])
@pytest.mark.parametrize("stream", [False, True])
class TestEveryChoice:
    @pytest.mark.parametrize("case", QUESTIONS, ids=lambda case: case.call["name"])
    def test_auto(self, url: str, ask: Any, stream: bool, case: Any) -> None:
        request = {**body("auto", None), "messages": case.messages, "tools": case.tools}
        content, calls, reason = ask(url, request, stream)
        assert content == ""
        assert [(name, json.loads(text)) for name, text in calls] == [
            (case.call["name"], case.call["arguments"])
        ]
        assert reason == "tool_calls"

    def test_auto_with_two_calls(self, url: str, ask: Any, stream: bool) -> None:
        content, calls, reason = ask(url, body("auto", TWO), stream)
        assert content == "Both."
        assert calls == [("forecast", '{"town": "Oslo"}')] * 2
        assert reason == "tool_calls"

    def test_auto_with_an_answer(self, url: str, ask: Any, stream: bool) -> None:
        assert ask(url, body("auto", "a <b> c"), stream) == ("a <b> c", [], "stop")

    def test_auto_with_a_malformed_call(self, url: str, ask: Any, stream: bool) -> None:
        reply = "<tool_call>I would rather not.</tool_call>"
        assert ask(url, body("auto", reply), stream) == ("I would rather not.", [], "stop")

    def test_none(self, url: str, ask: Any, stream: bool) -> None:
        assert ask(url, body("none", TWO), stream) == ("Both.", [], "stop")

    @pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
    def test_a_demanded_call(
        self, url: str, ask: Any, stream: bool, choice: Any, reason: str
    ) -> None:
        # So small a model would add calls until the limit.
        request = {**body(choice, None), "parallel_tool_calls": False}
        content, calls, found = ask(url, request, stream)
        assert content == ""
        ((name, arguments),) = calls
        assert name == "forecast"
        assert json.loads(arguments)["town"] in TOWNS
        assert found in (reason, "length")


@pytest.mark.parametrize("stream", [False, True])
class TestResponses:
    @pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "forecast"}])
    def test_a_demanded_call(self, url: str, stream: bool, choice: Any) -> None:
        tool = {"type": "function", **FORECAST["function"], "strict": True}
        calls = responses_calls(
            url, stream, input="Weather?", tools=[tool], tool_choice=choice, max_output_tokens=200
        )
        assert calls[0][0] == "forecast"
        assert json.loads(calls[0][1])["town"] in TOWNS

    def test_auto(self, url: str, stream: bool) -> None:
        case = QUESTIONS[0]
        tools = [{"type": "function", **tool["function"]} for tool in case.tools]
        calls = responses_calls(
            url, stream, input=case.messages, tools=tools, tool_choice="auto", temperature=0
        )
        assert [(name, json.loads(text)) for name, text in calls] == [
            (case.call["name"], case.call["arguments"])
        ]


def responses_calls(url: str, stream: bool, **request: Any) -> list[tuple[str, str]]:
    """Ask by Responses; return name and arguments of the calls, those of a stream as pieces."""
    import openai

    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        found = client.responses.create(model="m", stream=stream, **request)
        if not stream:
            calls = [item for item in found.output if item.type == "function_call"]
            assert len({call.call_id for call in calls}) == len(calls)
            return [(call.name, call.arguments) for call in calls]
        names: dict[str, str] = {}
        pieces: dict[str, str] = {}
        for event in found:
            if event.type == "response.output_item.added" and event.item.type == "function_call":
                names[event.item.id] = event.item.name
                pieces[event.item.id] = ""
            elif event.type == "response.function_call_arguments.delta":
                pieces[event.item_id] += event.delta
            elif event.type == "response.function_call_arguments.done":
                assert event.arguments == pieces[event.item_id]
        return [(names[key], pieces[key]) for key in names]


def test_a_tool_choice_that_is_not_read_is_the_clients_mistake(url: str) -> None:
    import openai

    tool = {"type": "function", **FORECAST["function"], "strict": True}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]}
    with (
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="tool_choice must be none, auto"),
    ):
        client.responses.create(model="m", input="Weather?", tools=[tool], tool_choice=choice)


def test_an_earlier_call_is_the_same_bytes_in_the_next_prompt(url: str) -> None:
    function = {"name": "get_stock", "arguments": WRITTEN}
    calls = [{"id": "id0", "type": "function", "function": function}]
    messages = [
        {"role": "user", "content": "Show the price of UX570."},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "id0", "content": "41.5"},
    ]
    root = url.removesuffix("/v1")
    tokens = _post(f"{root}/tokenize", {"model": "m", "messages": messages})["tokens"]
    prompt = _post(f"{root}/detokenize", {"model": "m", "tokens": tokens})["prompt"]
    assert render_calls(family("glm47"), calls) in prompt


def _post(url: str, data: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    call = urllib.request.Request(url, json.dumps(data).encode(), headers)
    with urllib.request.urlopen(call, timeout=ANSWER_SECONDS) as answer:
        return json.loads(answer.read())
