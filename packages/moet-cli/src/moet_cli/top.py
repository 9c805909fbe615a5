"""`moet top`: what a running server does, live."""

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from moet_cli.interrupts import Interrupted
from moet_cli.metrics import Page, fetch_page, server_address
from moet_cli.output import Output, make_table
from moet_cli.rates import NAMES, RankRates, Rates, compare

__all__ = ["run_top"]

NO_POOL = (
    "No pool of experts: this server has none, or was not started by `moet serve`, which sets "
    "PROMETHEUS_MULTIPROC_DIR so that its processes share their metrics."
)
RESTARTED = "Counters went back: the server was restarted, and rates begin anew."


def run_top(output: Output, url: str, interval: float, *, once: bool) -> None:
    """Show a server's metrics: again and again until Ctrl-C, or once.

    On a terminal the view is renewed in place; elsewhere, and with --json, each interval is printed
    after the other.

    Args:
        output: Where to.
        url: Address of the server.
        interval: Seconds between two looks.
        once: Stop after the first interval.

    Raises:
        MoetError: No server, or one without vLLM's metrics.
    """
    address = server_address(url)
    console = Console()
    if once:
        _print(output, address, interval, once=True)
        return
    try:
        if output.json or not console.is_terminal:
            _print(output, address, interval, once=False)
        else:
            _renew(console, address, interval)
    except Interrupted as interrupt:
        if interrupt.signum != signal.SIGINT:
            raise


def _print(output: Output, address: str, interval: float, *, once: bool) -> None:
    looks = _looks(address, interval)
    next(looks)  # there are no rates yet
    for rates in looks:
        output.result(_as_data(address, rates), *_as_text(address, rates))
        if once:
            return


def _renew(console: Console, address: str, interval: float) -> None:
    with Live(console=console, auto_refresh=False) as live:
        for rates in _looks(address, interval):
            parts = _as_text(address, rates)
            shown = (Text(part) if isinstance(part, str) else part for part in parts)
            live.update(Group(*shown), refresh=True)


def _looks(address: str, interval: float) -> Iterator[Rates]:
    before: Page | None = None
    while True:
        page = fetch_page(address, NAMES)
        yield compare(page, before)
        before = page
        time.sleep(interval)


def _as_data(address: str, rates: Rates) -> dict[str, Any]:
    notes = _notes(rates)
    return {"event": "top", "url": address, **msgspec.structs.asdict(rates), "notes": notes}


def _notes(rates: Rates) -> list[str]:
    notes = [RESTARTED] if rates.restarted else []
    return notes if rates.ranks else [*notes, NO_POOL]


def _as_text(address: str, rates: Rates) -> list[Table | str]:
    past = "now" if rates.seconds is None else f"the last {rates.seconds:.1f} s"
    serving = rates.serving
    parts: list[Table | str] = [
        f"{address}, {past}",
        f"{_cell(_count, serving.running)} running, {_cell(_count, serving.waiting)} waiting; "
        f"decode {_cell(_number, serving.decode_tokens_per_second)} tokens/s, "
        f"prompts {_cell(_number, serving.prompt_tokens_per_second)} tokens/s; "
        f"KV cache {_cell(_percent, serving.kv_cache_used)}",
    ]
    if rates.ranks:
        parts.append(_table(rates.ranks))
    return [*parts, *_notes(rates)]


def _table(ranks: tuple[RankRates, ...]) -> Table:
    columns = ["pool of experts", *(f"rank {rank.rank}" for rank in ranks)]
    rows = [
        (label, *(", ".join(_cell(show, getattr(rank, name)) for name in names) for rank in ranks))
        for label, show, names in ROWS
    ]
    table = make_table("", columns, rows)
    table.title = None
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _cell(show: Callable[[float], str], value: float | None) -> str:
    return "-" if value is None else show(value)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _number(value: float) -> str:
    return f"{value:,.1f}"


def _precise(value: float) -> str:
    return f"{value:,.2f}"


def _count(value: float) -> str:
    return f"{value:,}"


def _mib(value: float) -> str:
    return f"{value / 2**20:,.1f}"


ROWS: tuple[tuple[str, Callable[[float], str], tuple[str, ...]], ...] = (
    ("steps/s", _number, ("steps_per_second",)),
    ("steps repaired, streamed", _percent, ("repaired_share", "streamed_share")),
    ("passes a step", _precise, ("passes_per_step",)),
    ("hit rate", _percent, ("hit_rate",)),
    ("misses a step", _number, ("misses_per_step",)),
    ("MiB/s moved to the device", _mib, ("moved_bytes_per_second",)),
    ("ms stalled a step", _number, ("stall_ms_per_step",)),
    ("experts held, slots", _count, ("resident", "slots")),
    ("coverage", _percent, ("coverage",)),
    ("hit rate of the arena", _percent, ("arena_hit_rate",)),
    ("MiB/s read from packs", _mib, ("read_bytes_per_second",)),
    ("steps failed, degraded (total)", _count, ("failed_steps", "degraded_steps")),
    ("errors of reads, checksums (total)", _count, ("read_errors", "checksum_errors")),
)
"""Rows of the table: what they are called, how they are shown, and the fields of `RankRates`."""
