"""Renders tables and plots of docs/ from bench/results; `--check` only looks for drift."""

import sys
from pathlib import Path

from gate.plot import recovered
from kernels.plot import roofline
from residency.plot import hit_rates

from moet_core.errors import MoetError
from moet_core.render import render_page, stale_pages
from moet_core.results import read_result

ROOT = Path(__file__).parents[1]

PLOTS = {
    "docs/kernels.svg": ("bench/results/kernels-h200.json", roofline),
    "docs/gate.svg": ("bench/results/gate-curves.json", recovered),
    "docs/residency.svg": ("bench/results/residency.json", hit_rates),
}


def rendered() -> dict[Path, str]:
    """Return the files of docs/ that do not say what the results say, with what they should."""
    stale = stale_pages(ROOT, sorted((ROOT / "docs").glob("*.md")))
    found = {page: render_page(page.read_text(), ROOT) for page in stale}
    for name, (result, draw) in PLOTS.items():
        plot, path = draw(read_result(ROOT / result)), ROOT / name
        if not path.exists() or path.read_text() != plot:
            found[path] = plot
    return found


def main() -> int:
    """Return 0 if tables and plots say what the results say (or do so now), else 1."""
    try:
        stale = rendered()
        if sys.argv[1:] == ["--check"]:
            for path in stale:
                print(f"{path.relative_to(ROOT)} differs from its results; run bench/render.py")
            return 1 if stale else 0
        for path, text in stale.items():
            path.write_text(text)
            print(f"rendered {path.relative_to(ROOT)}")
    except MoetError as error:
        print(f"render: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
