"""Renders the tables of docs/*.md from bench/results; `--check` only looks for drift."""

import sys
from pathlib import Path

from moet_core.errors import MoetError
from moet_core.render import render_page, stale_pages

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Return 0 if the pages say what the results say (or do so now), else 1."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    try:
        stale = stale_pages(ROOT, pages)
        if sys.argv[1:] == ["--check"]:
            for page in stale:
                print(f"{page.relative_to(ROOT)} differs from its results; run bench/render.py")
            return 1 if stale else 0
        for page in stale:
            page.write_text(render_page(page.read_text(), ROOT))
            print(f"rendered {page.relative_to(ROOT)}")
    except MoetError as error:
        print(f"render: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
