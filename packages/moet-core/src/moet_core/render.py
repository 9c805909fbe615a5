"""Tables of documentation pages, rendered from committed result files.

A page holds blocks of the form

    <!-- rendered from bench/results/codecs.json -->
    ...
    <!-- end -->

and everything between the two lines is written by `render_page`. `compared from FILE FILE...`
instead of `rendered from FILE` gives one table with a column of medians for each file.
`tabulated from FILE: FIGURE` gives the medians of the measurements "FIGURE: ROW, COLUMN". The other
two can be followed by `: FIGURE` as well, which leaves out all but "FIGURE: ...".
`stale_pages` finds pages whose blocks do not say what the files say.
"""

import re
from pathlib import Path

import msgspec

from moet_core.errors import ConfigError
from moet_core.results import Measurement, Result, read_result

__all__ = ["comparison_table", "pivot_table", "render_page", "result_table", "stale_pages"]

_BLOCK = re.compile(
    r"^<!-- (?P<how>rendered|compared|tabulated) from (?P<files>[^\n:]+?)"
    r"(?:: (?P<figure>[^\n]+?))? -->\n.*?^<!-- end -->$",
    re.MULTILINE | re.DOTALL,
)
_START = re.compile(r"^<!-- (?:rendered|compared|tabulated) from ", re.MULTILINE)


def render_page(page: str, root: Path) -> str:
    """Return a page with all its blocks rendered anew.

    Args:
        page: text of the page.
        root: folder that the files' names in the page are relative to.

    Raises:
        ConfigError: a block without an end, or a result file that cannot be read.
    """
    if len(_START.findall(page)) != len(_BLOCK.findall(page)):
        raise ConfigError(
            "A block '<!-- rendered from FILE -->' has no '<!-- end -->' on a line of its own."
        )

    def block(found: re.Match[str]) -> str:
        names = found["files"].split()
        results = {Path(name).stem: read_result(root / name) for name in names}
        figure = found["figure"]
        if figure:
            results = {name: _only(result, figure) for name, result in results.items()}
        if found["how"] == "compared":
            table = comparison_table(results)
        elif found["how"] == "tabulated":
            (result,) = results.values()
            table = pivot_table(result)
        else:
            table = "\n".join(result_table(result) for result in results.values())
        return f"{found[0].splitlines()[0]}\n{table}<!-- end -->"

    return _BLOCK.sub(block, page)


def stale_pages(root: Path, pages: list[Path]) -> list[Path]:
    """Return the pages that `render_page` would change."""
    return [page for page in pages if render_page(page.read_text(), root) != page.read_text()]


def result_table(result: Result) -> str:
    """Return a result as Markdown: its measurements, then what they were measured on."""
    lines = ["| what | median | min | max | samples |", "|---|---:|---:|---:|---:|"]
    lines += [_row(found) for found in result.measurements]
    machine = result.machine
    memory = f"{machine.memory_bytes / 2**30:.0f} GiB"
    what = ", ".join((*machine.gpus, machine.cpu, f"{machine.cores} cores", memory))
    versions = ", ".join(f"{name} {version}" for name, version in sorted(result.versions.items()))
    commit = "no commit"
    if result.commit is not None:
        commit = result.commit.id[:12] + (", changed" if result.commit.dirty else "")
    lines += [
        "",
        f"Measured {result.started:%Y-%m-%d} on {what}; {versions}; commit {commit}.",
        *result.notes,
    ]
    return "\n".join(lines) + "\n"


def comparison_table(results: dict[str, Result]) -> str:
    """Return the medians of several results, by their names, side by side as Markdown."""
    columns = [{found.name: found for found in result.measurements} for result in results.values()]
    names = {name: found.unit for column in columns for name, found in column.items()}
    lines = ["| what | " + " | ".join(results) + " |", "|---|" + "---:|" * len(results)]
    for name, unit in names.items():
        cells = [_number(c[name].median) if name in c else "" for c in columns]
        lines.append(f"| {name} ({unit}) | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def pivot_table(result: Result) -> str:
    """Return medians as Markdown; the measurements are named "FIGURE: ROW, COLUMN".

    Raises:
        ConfigError: a measurement has another name, or another figure than the first.
    """
    cells: dict[str, dict[str, Measurement]] = {}
    figures = set()
    for found in result.measurements:
        figure, _, rest = found.name.partition(": ")
        row, _, column = rest.rpartition(", ")
        figures.add(figure)
        if not row or len(figures) > 1:
            raise ConfigError(
                f"A table of one figure needs measurements 'FIGURE: ROW, COLUMN', got "
                f"{found.name!r}; name the figure after the file, as in 'FILE: FIGURE'."
            )
        cells.setdefault(row, {})[column] = found
    columns = dict.fromkeys(column for held in cells.values() for column in held)
    unit = next(found.unit for held in cells.values() for found in held.values())
    lines = [
        f"| {figure} ({unit}) | " + " | ".join(columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for name, held in cells.items():
        numbers = [_number(held[c].median) if c in held else "" for c in columns]
        lines.append(f"| {name} | " + " | ".join(numbers) + " |")
    return "\n".join(lines) + "\n"


def _only(result: Result, figure: str) -> Result:
    found = tuple(one for one in result.measurements if one.name.startswith(f"{figure}: "))
    if not found:
        raise ConfigError(f"The result has no measurement '{figure}: ...'.")
    return msgspec.structs.replace(result, measurements=found)


def _row(found: Measurement) -> str:
    numbers = " | ".join(_number(x) for x in (found.median, found.min, found.max))
    return f"| {found.name} ({found.unit}) | {numbers} | {len(found.samples)} |"


def _number(value: float) -> str:
    """Four significant digits, without an exponent."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
