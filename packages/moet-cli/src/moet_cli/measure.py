"""What a suite measures on a running server."""

import random
from collections.abc import Callable

from moet_cli.client import Client
from moet_cli.recipe import Suite
from moet_core.results import Measurement, measurement

__all__ = ["NOTES", "measure", "prompt_of"]

NOTES = (
    "decode: tokens of an answer to a short prompt, over the time of the whole request; "
    "end-of-text is ignored",
    "prefill: prompt tokens as the server counts them, over the time of a request for one token; "
    "every prompt is new from its first word on, so no cached prefix helps",
    "first token: a streamed request with the decode prompt, as the client sees it",
    "host memory: PSS of all server processes, a sample a second from the start; the peak is max",
    "one request at a time; one unmeasured run of each kind goes first",
)
DECODE_WORDS = 16
_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word"
)


def prompt_of(words: int, seed: int) -> str:
    """Return a prompt of `words` words, another one for every seed."""
    picked = random.Random(seed).choices(_WORDS.split(), k=words - 1)  # noqa: S311 - not a secret
    return " ".join([str(seed), *picked])


def measure(client: Client, suite: Suite, say: Callable[[str], None]) -> list[Measurement]:
    """Run a suite.

    Args:
        client: of the server to measure.
        suite: what to run.
        say: told what is measured next.
    """
    seeds = iter(range(1000, 10**9))

    say(f"decode: {suite.runs} runs of {suite.decode_tokens} tokens")
    client.complete(prompt_of(DECODE_WORDS, next(seeds)), suite.decode_tokens)
    decoded = [
        client.complete(prompt_of(DECODE_WORDS, next(seeds)), suite.decode_tokens)
        for _ in range(suite.runs)
    ]
    say(f"prefill: {suite.runs} runs of {suite.prefill_words} words")
    client.complete(prompt_of(suite.prefill_words, next(seeds)), 1)
    prefilled = [
        client.complete(prompt_of(suite.prefill_words, next(seeds)), 1) for _ in range(suite.runs)
    ]
    return [
        measurement("decode", "tokens/s", [answer.rate for answer in decoded]),
        measurement("prefill", "tokens/s", [a.prompt_tokens / a.seconds for a in prefilled]),
        measurement("prefill prompt", "tokens", [a.prompt_tokens for a in prefilled]),
        measurement("time to first token", "s", [a.first_token_seconds for a in decoded]),
    ]
