"""Ctrl-C, SIGTERM and SIGHUP as one exception, so that `finally` and `with` clean up after each."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Interrupted", "deferred", "raising"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """The user or the system asked moet to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextmanager
def raising() -> Iterator[None]:
    """Raise `Interrupted` in the main thread on the first signal that asks to stop."""
    with _handling(_raise):
        yield


@contextmanager
def deferred() -> Iterator[None]:
    """Finish the block first: a signal that arrives within it raises `Interrupted` at its end."""
    arrived: list[int] = []
    with _handling(lambda signum, _frame: arrived.append(signum)):
        yield
    if arrived:
        raise Interrupted(arrived[0])


def _raise(signum: int, _frame: FrameType | None) -> None:
    raise Interrupted(signum)


@contextmanager
def _handling(handler: Any) -> Iterator[None]:
    # What nohup or a shell's background job told us to ignore stays ignored.
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
