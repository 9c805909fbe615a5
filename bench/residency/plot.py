"""The plot of docs/residency.md: hit rate over coverage, a panel for each trace, as SVG."""

import re
from xml.sax.saxutils import escape

from moet_core.errors import ConfigError
from moet_core.results import Result

__all__ = ["curves", "draw", "hit_rates"]

NAME = re.compile(r"hit rate at (?P<coverage>[\d.]+) %: (?P<trace>.+), (?P<policy>.+)")

Curves = dict[str, dict[str, list[tuple[float, float]]]]
"""By trace and policy: (coverage in percent, hit rate), ascending."""

# Colours of Okabe and Ito, which the colour-blind can tell apart; dashes for a print without any.
STYLES = {
    "Belady": ("#000000", "2 3"),
    "moet": ("#d55e00", ""),
    "LFU-decayed": ("#0072b2", "7 3"),
    "LFU": ("#009e73", "1 4"),
    "LRU": ("#cc79a7", "9 3 2 3"),
}

WIDTH, HEIGHT = 250, 180  # of a panel's axes
LEFT, TOP, GAP_X, GAP_Y, COLUMNS = 54, 60, 64, 70, 3


def curves(result: Result) -> Curves:
    """Return the hit rates of a result of `moet bench residency`.

    Raises:
        ConfigError: it has none, or some of a policy that has no style here.
    """
    found: Curves = {}
    for one in result.measurements:
        if name := NAME.fullmatch(one.name):
            if name["policy"] not in STYLES:
                wanted = ", ".join(STYLES)
                raise ConfigError(f"The plot draws {wanted}; found policy {name['policy']!r}.")
            points = found.setdefault(name["trace"], {}).setdefault(name["policy"], [])
            points.append((float(name["coverage"]), one.median))
    if not found:
        raise ConfigError("The result has no measurement 'hit rate at COVERAGE %: TRACE, POLICY'.")
    return {
        trace: {policy: sorted(points) for policy, points in lines.items()}
        for trace, lines in found.items()
    }


def hit_rates(result: Result) -> str:
    """Return the plot of a result."""
    return draw(curves(result))


def draw(found: Curves) -> str:
    """Return an SVG document."""
    rows = -(-len(found) // COLUMNS)
    columns = min(COLUMNS, len(found))
    width = LEFT + columns * (WIDTH + GAP_X)
    height = TOP + rows * (HEIGHT + GAP_Y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_legend([policy for policy in STYLES if any(policy in lines for lines in found.values())]),
    ]
    for index, (trace, lines) in enumerate(found.items()):
        row, column = divmod(index, COLUMNS)
        x, y = LEFT + column * (WIDTH + GAP_X), TOP + row * (HEIGHT + GAP_Y)
        parts += [f'<g transform="translate({x} {y})">', *_panel(trace, lines), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(policies: list[str]) -> list[str]:
    parts = []
    for index, policy in enumerate(policies):
        x = LEFT + index * 140
        parts.append(_line([(x, 20), (x + 32, 20)], policy))
        parts.append(f'<text x="{x + 38}" y="24">{escape(policy)}</text>')
    return parts


def _panel(trace: str, lines: dict[str, list[tuple[float, float]]]) -> list[str]:
    parts = [f'<text x="{WIDTH / 2:g}" y="-8" text-anchor="middle">{escape(trace)}</text>']
    for percent in (0, 25, 50, 75, 100):
        x, y = WIDTH * percent / 100, HEIGHT * (1 - percent / 100)
        parts += [
            f'<path d="M{x:g} 0V{HEIGHT}M0 {y:g}H{WIDTH}" stroke="#dddddd"/>',
            f'<text x="{x:g}" y="{HEIGHT + 16}" text-anchor="middle">{percent}</text>',
            f'<text x="-6" y="{y + 4:g}" text-anchor="end">{percent}</text>',
        ]
    parts.append(
        f'<text x="{WIDTH / 2:g}" y="{HEIGHT + 34}" text-anchor="middle">'
        "% of the experts in the pool</text>"
    )
    parts.append(
        f'<text transform="translate(-36 {HEIGHT / 2:g}) rotate(-90)" text-anchor="middle">'
        "% of the routings hit</text>"
    )
    for policy in STYLES:
        points = [(WIDTH * x / 100, HEIGHT * (1 - y)) for x, y in lines.get(policy, [])]
        if points:
            parts.append(_line(points, policy))
    return parts


def _line(points: list[tuple[float, float]], policy: str) -> str:
    colour, dashes = STYLES[policy]
    where = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{where}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
