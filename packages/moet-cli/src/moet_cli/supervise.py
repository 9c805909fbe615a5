"""Runs a server: starts it, waits until it really serves, notices its death, stops all of it.

The server writes straight into its log file; this side follows that file. So nothing is lost when
either side dies, and no thread has to pump a pipe. A guard process (`moet_cli.guard`) is the
server's parent and stops the whole tree, also if moet is killed.
"""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeVar

import msgspec

from moet_cli.guard import ServerEnded
from moet_cli.interrupts import deferred
from moet_cli.phases import FIRST_PHASE, LAST_PHASE, later_phase
from moet_cli.probe import ProbeError, first_token, is_healthy
from moet_cli.process_tree import KILL_SECONDS, stop_session
from moet_cli.server_events import ServerEvent, parse_event
from moet_cli.server_log import LogFollower, error_lines
from moet_core.errors import MoetError
from moet_vllm.events import Converted, Pool, ProcessEnded
from moet_vllm.watch import oom_kills

__all__ = ["Launch", "Progress", "Server", "ServerError"]

GRACE_SECONDS = 5.0
POLL_SECONDS = 0.1
# After a death the others still write down why; and the kernel's counter lags a little.
LAST_WORDS_SECONDS = 1.0
KEPT_LINES = 2000

T = TypeVar("T")


class Launch(msgspec.Struct, frozen=True):
    """What to start.

    Attributes:
        command: the server's command line.
        environment: variables on top of this process's own.
        url: where the server will answer.
        log: file for its output.
        converts: whether every rank must report that its experts became W2.
        metrics: folder for the metrics of the server's processes, empty at the start and removed
            at the end. None leaves each process its own.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    url: str
    log: Path
    converts: bool = True
    metrics: Path | None = None


class Progress(msgspec.Struct, frozen=True):
    """How a start goes: what is being done, for how long, and how long nothing was logged."""

    phase: str
    elapsed: float
    quiet: float


class ServerError(MoetError):
    """The server did not start, or did not live."""


class Server:
    """A running server; use it in a `with` statement, which starts and stops it.

    Attributes:
        launch: what was started.
        converted: what each rank's worker reported about its experts, by rank.
        pools: what it reported about its pool of experts, if it has one, by rank.
        pid: process id of the guard, whose descendants the server's processes are.
        seconds_to_ready: from the start to the first token, 0 until then.
    """

    def __init__(self, launch: Launch, grace: float = GRACE_SECONDS) -> None:
        self.launch = launch
        self.converted: dict[int, Converted] = {}
        self.pools: dict[int, Pool] = {}
        self.pid = 0
        self.seconds_to_ready = 0.0
        self._grace = grace
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._phase = FIRST_PHASE

    def __enter__(self) -> "Server":
        self._oom_kills = oom_kills()
        self._started = self._last_line = time.monotonic()
        if self.launch.metrics is not None:
            _empty(self.launch.metrics)
        with _create(self.launch.log) as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "moet_cli.guard", str(self._grace), *self.launch.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | self.launch.environment | self._metrics_environment(),
                start_new_session=True,  # a Ctrl-C in the terminal is for moet alone
            )
        self.pid = self._guard.pid
        self._log = LogFollower(self.launch.log)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._log.close()
        if self.launch.metrics is not None:
            _remove(self.launch.metrics)

    def wait_ready(self, timeout: float, show: Callable[[Progress], None]) -> None:
        """Wait until the server has computed a token with experts that became W2.

        Args:
            timeout: seconds since the start.
            show: called several times a second.

        Raises:
            ServerError: it died, took too long, cannot compute, or runs without the plugin.
        """
        deadline = self._started + timeout

        def check() -> None:
            now = time.monotonic()
            show(Progress(self._phase, now - self._started, now - self._last_line))
            if now > deadline:
                self.stop()
                raise self._failed(
                    f"The server was not ready after {timeout:g} s; it was still "
                    f"{self._phase}. Allow more time with --set start_timeout=SECONDS"
                )

        while not is_healthy(self.launch.url):
            self.poll()
            check()
            time.sleep(POLL_SECONDS)
        self._phase = LAST_PHASE
        try:
            self.watch(lambda: first_token(self.launch.url, timeout), check)
        except ProbeError as error:
            self.stop()
            raise self._failed(f"The server is up, but cannot compute: {error}") from error
        self.poll()
        self._check_converted()
        self.seconds_to_ready = time.monotonic() - self._started

    def wait(self) -> NoReturn:
        """Wait until the server dies, which raises `ServerError`, or a signal arrives."""
        while True:
            self.poll()
            time.sleep(POLL_SECONDS)

    def watch(self, ask: Callable[[], T], check: Callable[[], None] = lambda: None) -> T:
        """Return `ask()`, a request to the server, unless the server dies meanwhile.

        Args:
            ask: runs in a thread; must fail when its connection breaks.
            check: called several times a second; may raise.

        Raises:
            ServerError: the server died.
        """
        with ThreadPoolExecutor(max_workers=1) as pool:
            answer = pool.submit(ask)
            try:
                while not answer.done():
                    self.poll()
                    check()
                    time.sleep(POLL_SECONDS)
            except BaseException:
                self.stop()  # which also ends the request
                raise
            if answer.exception() is not None:
                # A broken connection may be the first sign of a death.
                time.sleep(LAST_WORDS_SECONDS)
                self.poll()
            return answer.result()

    def poll(self) -> None:
        """Read what the server wrote, and raise `ServerError` if part of it died."""
        guard_ended = self._guard.poll() is not None  # before reading: then nothing comes after
        death = self._read()
        if death is None and not guard_ended:
            return
        time.sleep(LAST_WORDS_SECONDS)
        self.stop()
        raise self._failed(_describe(death, self._oom_kills))

    def stop(self) -> None:
        """Stop the whole process tree; a signal that arrives meanwhile takes effect afterwards."""
        with deferred():
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            try:
                self._guard.wait(self._grace + 2 * KILL_SECONDS)
            except subprocess.TimeoutExpired:
                self._guard.kill()
                self._guard.wait()
            stop_session(self.pid)

    def _metrics_environment(self) -> dict[str, str]:
        """Have all processes share their metrics, so that one page shows them."""
        folder = self.launch.metrics
        return {} if folder is None else {"PROMETHEUS_MULTIPROC_DIR": str(folder)}

    def _read(self) -> ServerEvent | None:
        """Take in new log lines; return the first death among them."""
        death: ServerEvent | None = None
        for line in self._log.lines():
            self._last_line = time.monotonic()
            event = parse_event(line)
            if event is None:
                self._lines.append(line)
                self._phase = later_phase(self._phase, line)
            elif isinstance(event, Converted):
                self.converted[event.rank] = event
            elif isinstance(event, Pool):
                self.pools[event.rank] = event
            else:
                death = death or event
        return death

    def _check_converted(self) -> None:
        if not self.launch.converts:
            return
        world = max((event.world for event in self.converted.values()), default=1)
        missing = [rank for rank in range(world) if rank not in self.converted]
        if not missing:
            return
        self.stop()
        if len(missing) == world:
            found = "the server started, but no expert became W2: the moet plugin did not run"
        else:
            found = f"the server started, but no expert of rank(s) {missing} of {world} became W2"
        raise self._failed(f"Refused to serve: {found}")

    def _failed(self, what: str) -> ServerError:
        self._read()
        said = "".join(f"\n    {line[:300]}" for line in error_lines(list(self._lines)))
        quoted = f" The log says:{said}\n" if said else " "
        return ServerError(f"{what.rstrip('.')}.{quoted}Its whole output: {self.launch.log}")


def _empty(folder: Path) -> None:
    """Make a folder for metrics; of one that is there, delete what prometheus_client wrote."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("*.db"):
            file.unlink()
    except OSError as error:
        raise ServerError(
            f"The folder {folder} for the server's metrics cannot be made: {error.strerror}; "
            "choose another place with --set log=FILE."
        ) from error


def _remove(folder: Path) -> None:
    with suppress(OSError):  # whatever else is in it stays
        for file in folder.glob("*.db"):
            file.unlink()
        folder.rmdir()


def _create(log: Path) -> BinaryIO:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("wb")
    except OSError as error:
        raise ServerError(
            f"The server's log {log} cannot be written: {error.strerror}; choose another file "
            "with --set log=FILE."
        ) from error


def _describe(death: ServerEvent | None, oom_kills_before: int) -> str:
    oom = oom_kills() - oom_kills_before
    if isinstance(death, ProcessEnded):
        oom = max(oom, death.oom_kills)
        who, exitcode = f"server's process {death.name} (pid {death.pid})", death.exitcode
    elif isinstance(death, ServerEnded):
        who, exitcode = f"server (pid {death.pid})", death.exitcode
    else:
        return "The server's guard process was killed, so the server was stopped"
    text = f"The {who} {_how(exitcode)}"
    if oom:
        text += (
            f"; the kernel's OOM killer ended {oom} process(es) here meanwhile: it needs more "
            "memory than there is"
        )
    return text


def _how(exitcode: int) -> str:
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    return f"was killed by {name}"
