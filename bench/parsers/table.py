"""The table of docs/parsers.md, from bench/results/parsers-upstream.json; `--check` only looks."""

import re
import sys
from pathlib import Path

from moet_core.results import Result, read_result

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/parsers.md"
RESULT = ROOT / "bench/results/parsers-upstream.json"
COLUMNS = tuple(
    f"{who} {how}" for who in ("vLLM", "moet") for how in ("whole", "1 at once", "3 at once")
)
BLOCK = re.compile(
    r"(<!-- comparison with upstream -->\n).*?(<!-- end of comparison -->)", re.DOTALL
)


def table(result: Result) -> str:
    """Return the counts as Markdown: a line for each family and kind of transcript."""
    counts = {found.name: int(found.median) for found in result.measurements}
    rows = list(dict.fromkeys(name.partition(":")[0] for name in counts))
    lines = [
        f"| transcripts | of these | {' | '.join(COLUMNS)} |",
        f"|---|---:|{'---:|' * len(COLUMNS)}",
    ]
    lines += [
        f"| {row} | {counts[f'{row}: transcripts']} | "
        + " | ".join(str(counts[f"{row}: {column}"]) for column in COLUMNS)
        + " |"
        for row in rows
    ]
    sums = [sum(counts[f"{row}: {column}"] for row in rows) for column in ("transcripts", *COLUMNS)]
    lines.append(f"| all | {' | '.join(map(str, sums))} |")
    versions = ", ".join(f"{name} {version}" for name, version in sorted(result.versions.items()))
    commit = f"; commit {result.commit.id[:12]}" if result.commit else ""
    return "\n".join([*lines, "", f"{versions}{commit}. " + ". ".join(result.notes) + ".", ""])


def main() -> int:
    """Return 0 if the page has the table (or has it now), else 1."""
    page = PAGE.read_text()
    text = table(read_result(RESULT))
    rendered, blocks = BLOCK.subn(lambda found: found[1] + text + found[2], page)
    if blocks != 1:
        print(f"{PAGE.relative_to(ROOT)} has no place for the table")
        return 1
    if sys.argv[1:] == ["--check"]:
        if rendered != page:
            print(f"{PAGE.relative_to(ROOT)} differs from its result; run bench/parsers/table.py")
        return int(rendered != page)
    PAGE.write_text(rendered)
    return 0


if __name__ == "__main__":
    sys.exit(main())
