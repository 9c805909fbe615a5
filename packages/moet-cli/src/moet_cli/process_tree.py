"""Stops everything below a process, also what left its group or session."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable

import psutil

__all__ = ["become_subreaper", "reap", "stop_descendants", "stop_session"]

PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.05
# A killed process can outlive SIGKILL for as long as it waits for a device; no longer than this.
KILL_SECONDS = 5.0


def become_subreaper() -> None:
    """Make this process the new parent of descendants whose own parent ends.

    So setsid and double forks hide nothing: every process that was started below this one stays
    below it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(error)}")


def reap() -> dict[int, int]:
    """Return the exit code of every child that ended since the last call (-N: by signal N)."""
    ended = {}
    try:
        while (found := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            pid, status = found
            ended[pid] = os.waitstatus_to_exitcode(status)
    except ChildProcessError:
        pass  # no child is left
    return ended


def stop_descendants(grace: float) -> None:
    """Ask everything below this process to end, and after `grace` seconds make it.

    This process must be a subreaper. It reaps all of its children.
    """
    _stop(_descendants, grace)


def stop_session(leader: int) -> None:
    """Kill every process of a session whose leader is gone."""
    _stop(lambda: _members(leader), grace=0.0)


def _stop(find: Callable[[], list[psutil.Process]], grace: float) -> None:
    start = time.monotonic()
    asked: set[psutil.Process] = set()
    while alive := find():
        waited = time.monotonic() - start
        if waited > grace + KILL_SECONDS:
            return
        for process in alive:
            if waited >= grace:
                _send(process, signal.SIGKILL)
            elif process not in asked:
                asked.add(process)
                _send(process, signal.SIGTERM)
        time.sleep(POLL_SECONDS)


def _descendants() -> list[psutil.Process]:
    reap()
    return [child for child in psutil.Process().children(recursive=True) if _is_alive(child)]


def _members(leader: int) -> list[psutil.Process]:
    return [p for p in psutil.process_iter() if _session(p.pid) == leader and _is_alive(p)]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _send(process: psutil.Process, signum: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signum)
