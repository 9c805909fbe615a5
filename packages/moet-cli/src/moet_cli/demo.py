"""`moet demo`: a real server with 2-bit experts, a talk with it, and what became W2."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from rich.table import Table

from moet_cli.checks import run_checks
from moet_cli.client import Answer, Client
from moet_cli.launch import running
from moet_cli.machine import installed_vllm
from moet_cli.output import Output, make_table, printable
from moet_cli.plan import resolve
from moet_cli.supervise import Server
from moet_core.errors import MoetError
from moet_vllm.events import Converted

__all__ = ["converted_table", "run_demo"]

PROMPT = "import os\n\n\ndef read("
# 2-bit experts cost a model as small as TinyMoE many of its skills (docs/quality.md says which);
# it still finds facts in a text and makes simple calls.
QUESTION = """Notes of the day.
The door code of red-fox is 4711.
The kitchen is closed today.
The locker number of blue-owl is 90210.
Lunch is at noon.

What is the locker number of blue-owl?"""
ERRAND = "Show the price of UX570 over 30 days."
PRICE = {"price": 41.5}  # what this demo's exchange always says
TOOL = {
    "type": "function",
    "function": {
        "name": "get_stock",
        "description": "Price of a share",
        "parameters": {
            "type": "object",
            "properties": {"symbol": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["symbol"],
        },
    },
}
MAX_TOKENS = 48


class Exchange(msgspec.Struct, frozen=True):
    """A question, and the assistant's words."""

    question: str
    answer: str


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call round trip: request, call, the tool's result, what the assistant made of it."""

    request: str
    name: str
    arguments: str
    result: str
    reply: str


class Talk(msgspec.Struct, frozen=True):
    """All that was said."""

    completion: Answer
    chat: Exchange
    tool_call: ToolCall


def run_demo(output: Output, *, keep: bool) -> None:
    """Serve TinyMoE on a free loopback port, talk to it, show what became W2.

    Args:
        output: where to show it.
        keep: serve on until Ctrl-C.

    Raises:
        MoetError: anything failed; also an answer without tokens, or a tool that is not called.
    """
    vllm = installed_vllm()
    recipe = "demo-gpu" if vllm is not None and not vllm.cpu else "demo"
    plan = resolve(recipe, ["port=0"])
    run_checks(plan)
    with running(plan, output) as server:
        talk = server.watch(lambda: _talk(server.launch.url))
        if keep:
            # First: whoever reads what follows may stop the server at once.
            output.say(f"serving at {server.launch.url}/v1 until Ctrl-C")
        _show(output, server, talk)
        if keep:
            server.wait()


def _talk(url: str) -> Talk:
    with Client(url) as client:
        completion = client.complete(PROMPT, MAX_TOKENS)
        answer = client.converse([{"role": "user", "content": QUESTION}], [], MAX_TOKENS).text
        if completion.completion_tokens < 1 or not answer:
            raise MoetError(f"An answer has no tokens: {completion}, {answer!r}.")
        return Talk(completion, Exchange(QUESTION, answer), _round_trip(client))


def _round_trip(client: Client) -> ToolCall:
    """Ask for something that needs the tool, and hand the tool's result back."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": ERRAND}]
    asked = client.converse(messages, [TOOL], MAX_TOKENS)
    if len(asked.calls) != 1:
        raise MoetError(
            f"The model was to call get_stock once; it made {len(asked.calls)} calls and said "
            f"{asked.text!r}."
        )
    ((call_id, name, arguments),) = asked.calls
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    result = json.dumps(PRICE)
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": result},
    ]
    reply = client.converse(messages, [TOOL], MAX_TOKENS).text
    return ToolCall(ERRAND, name, arguments, result, reply)


def _show(output: Output, server: Server, talk: Talk) -> None:
    converted = [event for _, event in sorted(server.converted.items())]
    data = {
        "event": "demo",
        "url": server.launch.url,
        "log": str(server.launch.log),
        "seconds_to_ready": round(server.seconds_to_ready, 3),
        "completion": _answer_as_data(talk.completion),
        "chat": talk.chat,
        "tool_call": talk.tool_call,
        "converted": converted,
    }
    output.result(data, *_talk_as_text(talk), "", converted_table(converted))


def _answer_as_data(answer: Answer) -> dict[str, Any]:
    return {
        "prompt": answer.prompt,
        "text": answer.text,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "first_token_seconds": round(answer.first_token_seconds, 4),
        "tokens_per_second": round(answer.rate, 2),
    }


def _talk_as_text(talk: Talk) -> Iterable[str]:
    answer, call = talk.completion, talk.tool_call
    yield ""
    yield f"completion of {answer.prompt!r}:"
    yield f"  {printable(answer.text)!r}"
    yield f"  {answer.completion_tokens} tokens, {answer.rate:.1f} tokens/s"
    for who, words in (
        ("", ""),
        ("user", talk.chat.question),
        ("assistant", talk.chat.answer),
        ("", ""),
        ("user", call.request),
        ("assistant calls", f"{call.name} {call.arguments}"),
        ("tool", call.result),
        ("assistant", call.reply),
    ):
        yield f"{who}: {printable(words)}" if who else ""


def converted_table(converted: list[Converted]) -> Table:
    """Show what each rank's experts were and what they are now."""
    facts: dict[str, Callable[[Converted], str]] = {
        "layers": lambda event: str(event.layers),
        "experts": lambda event: str(event.experts),
        "tensors": lambda event: str(event.tensors),
        "format": lambda event: f"{event.source} -> {event.codec}" if event.layers else "",
        "bits a weight": lambda event: (
            f"{8 * event.bytes_before / event.weights:.2f} -> {event.bits_per_weight:.2f}"
            if event.bytes_before
            else f"{event.bits_per_weight:.2f}"
        ),
        "bytes": lambda event: (
            f"{event.bytes_before:,} -> {event.bytes_after:,}"
            if event.bytes_before
            else f"{event.bytes_after:,}"
        ),
        "smaller by": lambda event: (
            f"{event.bytes_before / event.bytes_after:.2f} x" if event.bytes_before else ""
        ),
    }
    columns = ["routed experts", *(f"rank {event.rank}" for event in converted)]
    rows = [(fact, *(show(event) for event in converted)) for fact, show in facts.items()]
    return make_table("What became W2", columns, rows)
