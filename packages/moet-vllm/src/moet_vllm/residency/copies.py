"""Copies of rows from host memory to a device, in their order, on a stream of their own.

Nothing here waits for the device unless its name says so. On a device without streams a copy is
done when it was started.
"""

import contextlib
from collections import deque
from typing import Any

import torch
from torch import Tensor

__all__ = ["Copies", "Moment"]


class Moment:
    """A moment of a stream: what was queued there before it has ended once it has passed.

    Args:
        stream: Stream of a GPU; None for a device on which work is done when it was queued.
    """

    def __init__(self, stream: "torch.cuda.Stream | None") -> None:
        self._event = None if stream is None else stream.record_event()

    @property
    def has_passed(self) -> bool:
        """Whether it has passed; does not wait."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Let the host wait until it has passed."""
        if self._event is not None:
            self._event.synchronize()

    def hold(self, stream: "torch.cuda.Stream | None") -> None:
        """Let what is queued on a stream from now on wait until it has passed."""
        if self._event is not None and stream is not None:
            stream.wait_event(self._event)


class Copies:
    """Copies into the memory of one device.

    Attributes:
        started: Copies that were started so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.started = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._done = 0
        self._marks: deque[tuple[int, Moment]] = deque()

    def start(self, target: Tensor, row: memoryview) -> int:
        """Start to copy a row, of pinned memory, and return its number, from 1."""
        source = torch.frombuffer(row, dtype=torch.uint8)
        with self._on_stream():
            target.copy_(source, non_blocking=True)
        self.started += 1
        return self.started

    def mark(self) -> Moment:
        """Return the moment at which all copies started so far are done."""
        self._forget_passed()  # a store that reuses no memory never asks what is done
        moment = Moment(self._stream)
        self._marks.append((self.started, moment))
        return moment

    def done(self) -> int:
        """Return how many copies are known to be done: all up to the last mark that has passed."""
        self._forget_passed()
        if self.started > self._done and not self._marks:
            self.mark()
        return self._done

    def wait(self) -> None:
        """Let the host wait until all copies are done."""
        self.mark().wait()
        self._marks.clear()
        self._done = self.started

    def hold_for(self, moment: Moment) -> None:
        """Let later copies wait for a moment of another stream."""
        moment.hold(self._stream)

    def now(self) -> Moment:
        """Return this moment of the stream that computes."""
        return Moment(self.computing())

    def computing(self) -> "torch.cuda.Stream | None":
        """Return the stream that computes, None on a device without streams."""
        return None if self._stream is None else torch.cuda.current_stream(self.device)

    def _forget_passed(self) -> None:
        while self._marks and self._marks[0][1].has_passed:
            self._done = self._marks.popleft()[0]

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
