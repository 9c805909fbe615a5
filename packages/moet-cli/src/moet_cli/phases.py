"""Tells from vLLM's log lines how far a start has come."""

import re

__all__ = ["FIRST_PHASE", "LAST_PHASE", "later_phase"]

FIRST_PHASE = "importing vLLM"
LAST_PHASE = "computing a first token"
_PHASES = {
    "reading the configuration": re.compile(r"non-default args|Resolved architecture"),
    "starting the engine": re.compile(r"Initializing a V1 LLM engine"),
    "loading and converting weights": re.compile(r"Starting to load model|Loading safetensors"),
    "preparing the model": re.compile(r"Loading weights took|Model loading took"),
    "compiling and warming up": re.compile(r"Compiling a graph|Warming up model"),
    "setting up the KV cache": re.compile(r"KV cache size|Maximum concurrency"),
    "capturing CUDA graphs": re.compile(r"Capturing CUDA graph"),
    "opening the API": re.compile(r"Starting vLLM.*server|Application startup"),
}
_ORDER = [FIRST_PHASE, *_PHASES, LAST_PHASE]


def later_phase(current: str, line: str) -> str:
    """Return the phase that a log line begins if that comes after `current`, else `current`.

    Several processes log, so a line of an earlier phase says nothing.
    """
    begun = [phase for phase, pattern in _PHASES.items() if pattern.search(line)]
    return max([current, *begun], key=_ORDER.index)
