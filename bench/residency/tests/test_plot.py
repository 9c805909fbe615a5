"""The plot shows the numbers of the result."""

import re
from datetime import UTC, datetime
from xml.etree import ElementTree

import pytest
from residency.plot import HEIGHT, STYLES, WIDTH, curves, hit_rates

from moet_core.errors import ConfigError
from moet_core.results import Command, Machine, Result, measurement

WHEN = datetime(2026, 1, 2, tzinfo=UTC)


def result_of(**values):
    """Return a result with measurements by name."""
    return Result(
        kind="residency",
        started=WHEN,
        finished=WHEN,
        commit=None,
        versions={},
        machine=Machine("A CPU", 2, 2**30, "6.1"),
        command=Command(("moet",)),
        measurements=tuple(measurement(name, "", [value]) for name, value in values.items()),
    )


FOUND = result_of(
    **{
        "hit rate at 50 %: code, moet": 0.75,
        "hit rate at 2.5 %: code, moet": 0.25,
        "hit rate at 50 %: code, LRU": 0.5,
        "hit rate at 50 %: a <b>, LRU": 1.0,
        "misses at 50 %: code, LRU": 7.0,
    }
)


def test_curves_are_the_hit_rates_in_the_order_of_coverage():
    assert curves(FOUND) == {
        "code": {"moet": [(2.5, 0.25), (50.0, 0.75)], "LRU": [(50.0, 0.5)]},
        "a <b>": {"LRU": [(50.0, 1.0)]},
    }


def test_a_panel_for_each_trace_and_a_line_for_each_policy():
    tree = ElementTree.fromstring(hit_rates(FOUND))
    space = {"s": "http://www.w3.org/2000/svg"}
    panels = tree.findall("s:g", space)
    titles = [panel.find("s:text", space).text for panel in panels]
    assert titles == ["code", "a <b>"]
    lines = [
        {line.get("stroke"): line.get("points") for line in panel.findall("s:polyline", space)}
        for panel in panels
    ]
    moet, lru = STYLES["moet"][0], STYLES["LRU"][0]
    assert lines[0][moet] == (
        f"{WIDTH * 0.025:.1f},{HEIGHT * 0.75:.1f} {WIDTH * 0.5:.1f},{HEIGHT * 0.25:.1f}"
    )
    assert lines[1] == {lru: f"{WIDTH * 0.5:.1f},0.0"}
    legend = [text.text for text in tree.findall("s:text", space)]
    assert legend == ["moet", "LRU"]


def test_everything_lies_inside_the_picture():
    tree = ElementTree.fromstring(hit_rates(FOUND))
    _, _, width, height = map(float, tree.get("viewBox").split())
    for panel in tree.findall("{http://www.w3.org/2000/svg}g"):
        x, y = map(float, re.findall(r"[\d.]+", panel.get("transform")))
        assert x + WIDTH <= width
        assert y + HEIGHT <= height


def test_no_hit_rates():
    with pytest.raises(ConfigError, match="no measurement 'hit rate"):
        hit_rates(result_of(other=1.0))


def test_a_policy_without_a_style():
    with pytest.raises(ConfigError, match=r"draws Belady, moet, .* found policy 'FIFO'"):
        hit_rates(result_of(**{"hit rate at 5 %: code, FIFO": 0.5}))
