"""Watches a serving process's children and reports how one died.

vLLM says that a worker died, not how; the exit signal is known only to its parent. This thread
runs in every process of a server started through `moet_vllm.server` that has children. A child
that lives for less than `POLL_SECONDS` may go unseen.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

from moet_vllm.events import ProcessEnded, emit

__all__ = ["oom_kills", "start", "start_in_server"]

POLL_SECONDS = 0.2
_watching_pid: int | None = None


def oom_kills() -> int:
    """Return how many processes of this control group the kernel's OOM killer ended so far.

    0 where the counter cannot be read (no cgroup file system).
    """
    path = _events_file()
    if path is None:
        return 0
    for line in path.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill":
            return int(value)
    return 0


def _events_file() -> Path | None:
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            candidates = [root / group.lstrip("/") / "memory.events", root / "memory.events"]
        elif "memory" in controllers.split(","):
            v1 = root / "memory"
            candidates = [v1 / group.lstrip("/") / "memory.oom_control", v1 / "memory.oom_control"]
        else:
            continue
        for candidate in candidates:
            if candidate.is_file():
                return candidate
    return None


def start_in_server() -> None:
    """Start watching if this process belongs to a server started through `moet_vllm.server`.

    Child processes inherit the command line, whether they were forked or spawned.
    """
    if Path(sys.argv[0]).parts[-2:] == ("moet_vllm", "server.py"):
        start()


def start() -> None:
    """Watch this process's children from a daemon thread; later calls do nothing."""
    global _watching_pid  # a forked child inherits the value but not the thread
    if _watching_pid == os.getpid():
        return
    _watching_pid = os.getpid()
    threading.Thread(target=_watch, name="moet-watch", daemon=True).start()


def _watch() -> None:
    before = oom_kills()
    alive: dict[int, multiprocessing.process.BaseProcess] = {}
    while True:
        for child in multiprocessing.active_children():
            if child.pid is not None:
                alive[child.pid] = child
        for pid, child in list(alive.items()):
            code = child.exitcode
            if code is None:
                continue
            del alive[pid]
            if code != 0:
                emit(ProcessEnded(child.name, pid, code, _signal_name(code), oom_kills() - before))
        time.sleep(POLL_SECONDS)


def _signal_name(exitcode: int) -> str:
    if exitcode >= 0:
        return ""
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return f"signal {-exitcode}"
