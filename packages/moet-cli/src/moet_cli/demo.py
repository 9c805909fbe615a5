"""`moet demo`: a real server with 2-bit experts, two questions, and a table of what became W2."""

from collections.abc import Callable, Iterable
from typing import Any

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

PROMPT = "Once upon a time"
QUESTION = "What is a mixture of experts?"
MAX_TOKENS = 48
NOISE = "random weights: the text is noise; the path is real"


def run_demo(output: Output, *, keep: bool) -> None:
    """Serve the demo model on a free loopback port, ask it twice, show what became W2.

    Args:
        output: where to show it.
        keep: serve on until Ctrl-C.

    Raises:
        MoetError: anything failed; also an answer without tokens.
    """
    vllm = installed_vllm()
    recipe = "demo-gpu" if vllm is not None and not vllm.cpu else "demo"
    plan = resolve(recipe, ["port=0"])
    run_checks(plan)
    with running(plan, output) as server:
        answers = server.watch(lambda: _ask(server.launch.url))
        for kind, answer in answers.items():
            if answer.completion_tokens < 1:
                raise MoetError(f"The {kind} answer has no tokens: {answer}.")
        _show(output, server, answers)
        if keep:
            output.say(f"serving at {server.launch.url}/v1 until Ctrl-C")
            server.wait()


def _ask(url: str) -> dict[str, Answer]:
    with Client(url) as client:
        return {
            "completion": client.complete(PROMPT, MAX_TOKENS),
            "chat": client.chat(QUESTION, MAX_TOKENS),
        }


def _show(output: Output, server: Server, answers: dict[str, Answer]) -> None:
    converted = [event for _, event in sorted(server.converted.items())]
    data = {
        "event": "demo",
        "url": server.launch.url,
        "log": str(server.launch.log),
        "seconds_to_ready": round(server.seconds_to_ready, 3),
        "answers": {kind: _answer_as_data(answer) for kind, answer in answers.items()},
        "converted": converted,
        "note": NOISE,
    }
    output.result(data, *_answers_as_text(answers), "", NOISE, "", converted_table(converted))


def _answer_as_data(answer: Answer) -> dict[str, Any]:
    return {
        "prompt": answer.prompt,
        "text": answer.text,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "first_token_seconds": round(answer.first_token_seconds, 4),
        "tokens_per_second": round(answer.rate, 2),
    }


def _answers_as_text(answers: dict[str, Answer]) -> Iterable[str]:
    for kind, answer in answers.items():
        yield ""
        yield f"{kind}: {answer.prompt}"
        yield f"  {printable(answer.text)!r}"
        yield f"  {answer.completion_tokens} tokens, {answer.rate:.1f} tokens/s"


def converted_table(converted: list[Converted]) -> Table:
    """Show what each rank's experts were and what they are now."""
    facts: dict[str, Callable[[Converted], str]] = {
        "layers": lambda event: str(event.layers),
        "experts": lambda event: str(event.experts),
        "tensors": lambda event: str(event.tensors),
        "format": lambda event: f"{event.source} -> {event.codec}",
        "bits a weight": lambda event: (
            f"{8 * event.bytes_before / event.weights:.2f} -> {event.bits_per_weight:.2f}"
        ),
        "bytes": lambda event: f"{event.bytes_before:,} -> {event.bytes_after:,}",
        "smaller by": lambda event: f"{event.bytes_before / event.bytes_after:.2f} x",
    }
    columns = ["routed experts", *(f"rank {event.rank}" for event in converted)]
    rows = [(fact, *(show(event) for event in converted)) for fact, show in facts.items()]
    return make_table("What became W2", columns, rows)
