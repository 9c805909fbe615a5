"""Reads a server's page of metrics, in the text format of Prometheus."""

import math
import time
import urllib.error
import urllib.request
from collections.abc import Collection
from http.client import HTTPException
from urllib.parse import urlsplit

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from moet_cli.output import printable
from moet_core.errors import MoetError, UsageError

__all__ = ["Labels", "MetricsError", "Page", "fetch_page", "parse_page", "server_address"]

Labels = frozenset[tuple[str, str]]

ANSWER_SECONDS = 10.0
"""A busy server may take seconds; a dead one refuses at once."""

MAX_PAGE_BYTES = 2**25
"""A page of vLLM has some hundred KiB; whatever else answers must not fill the memory."""

# A loopback address must not go through the proxy that the environment may name.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class MetricsError(MoetError):
    """No server, or one that shows no such metrics."""


class Page(msgspec.Struct, frozen=True):
    """Metrics of one moment.

    Attributes:
        at: The moment, in seconds of the monotonic clock.
        values: By name, and by labels: one metric may come from several engines or ranks.
    """

    at: float
    values: dict[str, dict[Labels, float]]


def server_address(url: str) -> str:
    """Return the address of a server without the paths that people copy along.

    Raises:
        UsageError: It is none of HTTP.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise UsageError(f"URL is the address of a server like http://127.0.0.1:8000, got {url!r}.")
    return url.rstrip("/").removesuffix("/metrics").removesuffix("/v1").rstrip("/")


def fetch_page(address: str, names: Collection[str]) -> Page:
    """Ask a server for its metrics.

    Args:
        address: As `server_address` returns it.
        names: As for `parse_page`.

    Raises:
        MetricsError: There is no server, or it shows something else.
    """
    url = f"{address}/metrics"
    try:
        with _DIRECT.open(url, timeout=ANSWER_SECONDS) as answer:
            data = answer.read(MAX_PAGE_BYTES + 1)
    except urllib.error.HTTPError as error:
        error.close()
        raise _no_metrics(url, f"HTTP {error.code} {printable(error.reason)}") from error
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise MetricsError(
            f"No server answers at {url}: {reason}. Start one with `moet serve`, or name the one "
            "you mean: `moet top http://HOST:PORT`."
        ) from error
    at = time.monotonic()
    if len(data) > MAX_PAGE_BYTES:
        raise _no_metrics(url, f"more than {MAX_PAGE_BYTES:,} bytes")
    try:
        return parse_page(data.decode(), at, names)
    except ValueError as error:
        raise _no_metrics(url, printable(str(error))[:200]) from error


def parse_page(text: str, at: float, names: Collection[str]) -> Page:
    """Read a page.

    Args:
        text: The page.
        at: When it was asked for, in seconds of the monotonic clock.
        names: Samples to keep; of a counter the name ends with _total.

    Raises:
        ValueError: It is no page of metrics, has none of `names`, or numbers that are none.
    """
    values: dict[str, dict[Labels, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in names:
                    labels = frozenset(sample.labels.items())
                    values.setdefault(sample.name, {})[labels] = float(sample.value)
    except (ValueError, IndexError, OverflowError) as error:
        raise ValueError(f"text that is no metric ({error})") from error
    if not values:
        raise ValueError("none of them")
    for name, found in values.items():
        if not all(map(math.isfinite, found.values())):
            raise ValueError(f"{name} without a finite value")
    return Page(at, values)


def _no_metrics(url: str, found: str) -> MetricsError:
    return MetricsError(
        f"Wanted the metrics of vLLM at {url}, found {found}. Is this the address of a server that "
        "`moet serve` or vLLM started, without --disable-log-stats?"
    )
