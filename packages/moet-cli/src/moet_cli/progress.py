"""Shows how a start goes: a spinner on a terminal, a line now and then elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.text import Text

from moet_cli.supervise import Progress

__all__ = ["describe", "shown"]

LINE_SECONDS = 15.0
QUIET_SECONDS = 10.0


@contextmanager
def shown() -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows progress on standard error."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _by_line()
        return
    with console.status(Text("starting")) as status:
        yield lambda progress: status.update(Text(describe(progress)))


def describe(progress: Progress) -> str:
    """Say in one line what is being done and that time goes on."""
    text = f"{progress.phase}: {progress.elapsed:.0f} s"
    if progress.quiet >= QUIET_SECONDS:
        text += f" (nothing logged for {progress.quiet:.0f} s)"
    return text


def _by_line() -> Callable[[Progress], None]:
    phase, at = "", 0.0

    def show(progress: Progress) -> None:
        nonlocal phase, at
        if progress.phase != phase or progress.elapsed - at >= LINE_SECONDS:
            phase, at = progress.phase, progress.elapsed
            click.echo(describe(progress), err=True)

    return show
