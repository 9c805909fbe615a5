"""What the commands say: results on standard output, everything else on standard error.

With --json, standard output carries JSON objects, one a line, and nothing else. Commands are
registered here because that switch is every command's.
"""

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moet_cli.nearest import unknown_name

__all__ = ["Group", "Output", "command", "make_table", "printable", "verbose_switch"]


class Output:
    """Where a command's words go.

    Attributes:
        json: results as JSON.
        verbose: errors with their traceback.
    """

    def __init__(self) -> None:
        self.json = False
        self.verbose = False

    def say(self, text: str) -> None:
        """Tell the user what happens."""
        click.echo(text, err=True)

    def result(self, data: Any, *shown: Table | str) -> None:
        """Print a result: `data` with --json, else the tables and texts that show it."""
        if self.json:
            click.echo(msgspec.json.encode(data).decode())
            return
        for part in shown:
            if isinstance(part, str):
                click.echo(part)
            else:
                Console().print(part)

    def error(self, message: str, exit_code: int, error: BaseException | None = None) -> None:
        """Print why a command failed."""
        if self.verbose and error is not None:
            click.echo("".join(traceback.format_exception(error)), err=True)
        click.echo(f"moet: {message}", err=True)
        if self.json:
            self.result({"event": "error", "error": message, "exit_code": exit_code})


def make_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """Make a table of plain text cells; long ones are folded, never cut."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    return table


def printable(text: str) -> str:
    """Replace what would move the cursor or change the terminal."""
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text)


class Group(click.Group):
    """Names the nearest command for an unknown one, whatever the version of click."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command, or say which one is nearest."""
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise click.UsageError(unknown_name("command", args[0], self.commands), ctx)
        return super().resolve_command(ctx, args)


def _switch(name: str, help_: str) -> Callable[[Any], Any]:
    """Make a flag that sets the attribute of the same name of the `Output`."""

    def switch_on(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value:
            setattr(ctx.find_object(Output), name, True)

    return click.option(
        f"--{name}",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=switch_on,
        help=help_,
    )


_json_switch = _switch(
    "json", "Print JSON, one object a line, and nothing else on standard output."
)
verbose_switch = _switch("verbose", "Show the traceback of an error.")


def command(group: click.Group, name: str, **settings: Any) -> Callable[[Any], click.Command]:
    """Register a command that takes --json and --verbose and gets the `Output`."""

    def register(function: Any) -> click.Command:
        return group.command(name, **settings)(
            _json_switch(verbose_switch(click.pass_obj(function)))
        )

    return register
