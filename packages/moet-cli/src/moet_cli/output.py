"""What the commands say: results on standard output, everything else on standard error.

With --json, standard output carries JSON objects, one a line, and nothing else.
"""

import traceback
from collections.abc import Sequence
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["Output", "make_table", "printable"]


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
