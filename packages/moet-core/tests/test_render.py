"""Documentation tables say what the result files say, and drift is found."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from moet_core.errors import ConfigError
from moet_core.render import render_page, stale_pages
from moet_core.results import (
    Command,
    Commit,
    Machine,
    Result,
    measurement,
    read_result,
    write_result,
)

WHEN = datetime(2026, 1, 2, tzinfo=UTC)
PAGE = "# Speed\n\n<!-- rendered from r.json -->\n<!-- end -->\n\nText.\n"


def write(root: Path, samples: list[float]) -> None:
    result = Result(
        kind="codecs",
        started=WHEN,
        finished=WHEN,
        commit=Commit("0123456789abcdef", True),
        versions={"numpy": "2.0", "moet": "0.1"},
        machine=Machine("A CPU", 2, 4 * 2**30, "6.1"),
        command=Command(("moet",)),
        measurements=(measurement("encode", "MB/s", samples),),
        notes=("One thread.",),
    )
    write_result(root / "r.json", result, force=True)


def test_a_block_becomes_the_file_s_table(tmp_path: Path) -> None:
    write(tmp_path, [1234.5, 10, 0.12345])
    assert render_page(PAGE, tmp_path) == (
        "# Speed\n\n<!-- rendered from r.json -->\n"
        "| what | median | min | max | samples |\n|---|---:|---:|---:|---:|\n"
        "| encode (MB/s) | 10 | 0.1235 | 1,234 | 3 |\n\n"
        "Measured 2026-01-02 on A CPU, 2 cores, 4 GiB; moet 0.1, numpy 2.0; "
        "commit 0123456789ab, changed.\nOne thread.\n"
        "<!-- end -->\n\nText.\n"
    )


def test_rendering_twice_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, [1.0])
    once = render_page(PAGE, tmp_path)
    assert render_page(once, tmp_path) == once


def test_a_page_that_says_something_else_is_stale(tmp_path: Path) -> None:
    write(tmp_path, [1.0])
    page = tmp_path / "page.md"
    page.write_text(render_page(PAGE, tmp_path))
    assert stale_pages(tmp_path, [page]) == []
    write(tmp_path, [2.0])
    assert stale_pages(tmp_path, [page]) == [page]


def test_a_block_without_an_end_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no '<!-- end -->'"):
        render_page("<!-- rendered from r.json -->\n", tmp_path)


def test_a_missing_result_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"r\.json"):
        render_page(PAGE, tmp_path)


def pivoted(root: Path, *names: str) -> None:
    write(root, [1.0])
    result = read_result(root / "r.json")
    found = tuple(measurement(name, "rows", [i, i + 2.0]) for i, name in enumerate(names))
    write_result(root / "r.json", msgspec.structs.replace(result, measurements=found), force=True)


def test_a_tabulated_block_puts_one_figure_into_rows_and_columns(tmp_path: Path) -> None:
    pivoted(tmp_path, "hits: a, b, LRU", "hits: a, b, LFU", "moves: a, LRU", "hits: c, LFU")
    page = "<!-- tabulated from r.json: hits -->\n<!-- end -->"
    assert render_page(page, tmp_path) == (
        "<!-- tabulated from r.json: hits -->\n"
        "| hits (rows) | LRU | LFU |\n|---|---:|---:|\n"
        "| a, b | 1 | 2 |\n| c |  | 4 |\n"
        "<!-- end -->"
    )


def test_a_figure_leaves_out_the_others(tmp_path: Path) -> None:
    pivoted(tmp_path, "hits: a", "hits at 5 %: a", "moves: a")
    for how in ("compared", "rendered"):
        table = render_page(f"<!-- {how} from r.json: hits -->\n<!-- end -->", tmp_path)
        assert "| hits: a (rows) |" in table
        assert "moves" not in table
        assert "5 %" not in table


@pytest.mark.parametrize("how", ["compared", "rendered", "tabulated"])
def test_a_figure_that_no_measurement_has_is_an_error(tmp_path: Path, how: str) -> None:
    pivoted(tmp_path, "hits: a, LRU")
    with pytest.raises(ConfigError, match=r"no measurement 'misses: \.\.\.'"):
        render_page(f"<!-- {how} from r.json: misses -->\n<!-- end -->", tmp_path)


@pytest.mark.parametrize("names", [("hits: a",), ("hits: a, LRU", "moves: a, LRU")])
def test_names_that_make_no_rows_and_columns(tmp_path: Path, names: tuple[str, ...]) -> None:
    pivoted(tmp_path, *names)
    with pytest.raises(ConfigError, match=f"'FIGURE: ROW, COLUMN', got '{names[-1]}'"):
        render_page("<!-- tabulated from r.json -->\n<!-- end -->", tmp_path)
