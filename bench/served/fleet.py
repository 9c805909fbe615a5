"""Starts engines, each in a process of its own with a log file, and gives them orders one by one.

Several engines live beside each other on one GPU, so that their starts overlap and measurements
can take turns; only the one that was asked works.
"""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from served.steps import wait_for

__all__ = ["Engine", "EngineError", "Spec", "fleet"]

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # requests of one call enter the same first step
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",  # a dozen engines that each spin on every core wait for each other
    # What only costs time at the start.
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


STOP_SECONDS = 15.0
"""Time for all engines of a fleet to end by themselves."""


APART_SECONDS = 1.0
"""Time between two engines' starts."""

PORT_TAKEN = "EADDRINUSE"


class EngineError(Exception):
    """An engine did not start, failed at an order or took too long; says which and why."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    Attributes:
        name: Also its log file's.
        model: Folder of the checkpoint.
        moet: The plugin's settings; None serves as stock vLLM.
        engine: More arguments of vLLM's LLM.
        compiled: torch.compile as vLLM does it by default; otherwise CUDA graphs alone, which
            start faster.
        without_experts: Leave the routed experts out, to see what the rest of a step takes.
        hashed: Keep the SHA-256 of every step's logits.
        environment: More environment variables.
        after: Name of an engine that must be ready before this one starts, such as the one that
            writes the packs that this one reads.
    """

    name: str
    model: str
    moet: dict[str, Any] | None = None
    engine: dict[str, Any] = {}
    compiled: bool = False
    without_experts: bool = False
    hashed: bool = False
    environment: dict[str, str] = {}
    after: str = ""


class Engine:
    """A running engine, or what is left of one.

    Its process starts at once and imports what it needs; the model is loaded after `begin`.

    Attributes:
        ready: What the engine said when it was; empty before.
        error: Why it is of no use; empty if it is.
    """

    def __init__(self, spec: Spec, logs: Path) -> None:
        self.spec = spec
        self.log = logs / f"{re.sub(r'[^A-Za-z0-9.]+', '-', spec.name)}.log"
        self.ready: dict[str, Any] = {}
        self.error = ""
        self._began = time.monotonic()
        self._answer, answer = os.pipe()
        environment = {**os.environ, **ENVIRONMENT, **spec.environment}
        command = [sys.executable, "-m", "served.engine", str(answer)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[answer],
                env=environment,
                start_new_session=True,
            )
        os.close(answer)
        self._buffer = b""

    def begin(self) -> None:
        """Have the engine load its model; the time of its start runs from here."""
        self._began = time.monotonic()
        with contextlib.suppress(EngineError):
            self._say(msgspec.to_builtins(self.spec))

    def wait(self, seconds: float) -> bool:
        """Wait until the engine is ready; False if it is of no use."""
        if not self.ready and not self.error:
            with contextlib.suppress(EngineError):
                self.ready = self._read(max(0.0, self._began + seconds - time.monotonic()))
                self.ready["seconds"] = time.monotonic() - self._began
        return not self.error

    def ask(self, task: str, seconds: float = 120.0, **arguments: Any) -> Any:
        """Have the engine do one of `served.tasks`; return what that returned.

        Raises:
            EngineError: It is of no use, raised something, or took longer than `seconds`; in the
                last case it is stopped.
        """
        if self.error:
            raise EngineError(f"{self.spec.name}: {self.error}")
        self._say({"task": task, "arguments": arguments})
        found = self._read(seconds)
        if "error" in found:
            raise EngineError(f"{self.spec.name}, {task}: {found['error']}")
        return found["result"]

    def tail(self, lines: int = 30) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def close(self) -> None:
        """Tell the engine that no more orders come, after which it ends."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    def stop(self, seconds: float) -> None:
        """See to it that the engine ends."""
        self.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._kill()
        self.error = self.error or "it was stopped"

    def _say(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self._fail("it ended")

    def _read(self, seconds: float) -> dict[str, Any]:
        """Read the next answer.

        Raises:
            EngineError: None came in time, or the process ended.
        """
        until = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._answer], [], [], left)[0]:
                self._kill()
                self._fail(f"no answer within {seconds:.0f} s")
            data = os.read(self._answer, 1 << 20)
            if not data:
                self._fail(f"it ended with status {self._process.wait()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _fail(self, why: str) -> None:
        self.error = self.error or why
        raise EngineError(f"{self.spec.name}: {self.error}")

    def _kill(self) -> None:
        """End the process and those it started: they are a session of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def fleet(
    specs: list[Spec], logs: Path, seconds: float, steps: Path | None = None
) -> Iterator[dict[str, Engine]]:
    """Start engines together and wait for all of them.

    Args:
        specs: Those with an `after` start once that engine is ready, and not at all if it fails.
        logs: Folder of their log files.
        seconds: Longest start of one engine.
        steps: Folder of `served.steps`: models load at its step `load`.

    Yields:
        Every engine by name, those that did not start too, with their `error`.
    """
    logs.mkdir(parents=True, exist_ok=True)
    engines: dict[str, Engine] = {}
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # engines must not outlive it
    try:
        waiting = list(specs)
        engines.update({spec.name: Engine(spec, logs) for spec in waiting if not spec.after})
        wait_for(steps, "load")
        for number, engine in enumerate(engines.values()):
            time.sleep(APART_SECONDS if number else 0)
            engine.begin()
        while waiting:
            started = [s for s in waiting if not s.after or s.after in engines]
            for spec in started:
                if not spec.after:
                    continue
                if not engines[spec.after].wait(seconds):
                    print(f"{spec.name}: not started, {spec.after} failed", flush=True)
                    continue
                engines[spec.name] = Engine(spec, logs)
                engines[spec.name].begin()
            if not started:
                raise ValueError(f"engines wait for unknown ones: {[s.after for s in waiting]}")
            waiting = [spec for spec in waiting if spec not in started]
        for name, engine in engines.items():
            if not engine.wait(seconds) and PORT_TAKEN in engine.tail(200):
                print(f"{name}: its port was taken, it starts once more", flush=True)
                engine.stop(0)
                engines[name] = Engine(engine.spec, logs)
                engines[name].begin()
        for engine in engines.values():
            state = "ready" if engine.wait(seconds) else f"FAILED: {engine.error}"
            took = engine.ready.get("seconds", 0.0)
            print(f"{engine.spec.name}: {state} after {took:.0f} s", flush=True)
        yield engines
    finally:
        for engine in engines.values():
            engine.close()
        until = time.monotonic() + STOP_SECONDS
        for engine in engines.values():
            engine.stop(max(0.0, until - time.monotonic()))
        signal.signal(signal.SIGTERM, before)
