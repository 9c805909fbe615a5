"""The plot of docs/gate.md: share of the lost KL recovered over passes a token, as SVG."""

import re

from moet_core.errors import ConfigError
from moet_core.results import Result

__all__ = ["Point", "draw", "points", "recovered"]

GATE = re.compile(r"gate (?P<tau>[\d.]+)")
TEXTS = {"short": "#d55e00", "long": "#0072b2"}
"""Colours of Okabe and Ito, which the colour-blind can tell apart."""

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 460, 260, 60, 40, 40, 50

Point = tuple[float, float, str]
"""Passes a token, share recovered, label."""


def points(result: Result) -> dict[str, dict[str, list[Point]]]:
    """Return the points of each kind of text: of the gate by tau, and of tiers filled by use.

    Raises:
        ConfigError: it is no result of bench/gate/curves.py.
    """
    values = {one.name: one.median for one in result.measurements}
    passes = {
        name.removeprefix("work a decoded token: ").removesuffix(", passes"): value
        for name, value in values.items()
        if name.startswith("work a decoded token: ") and name.endswith(", passes")
    }
    found: dict[str, dict[str, list[Point]]] = {}
    for text in TEXTS:
        lines: dict[str, list[Point]] = {"gate": [], "use": []}
        for name, taken in passes.items():
            share = values.get(f"share of the KL recovered: {name}, {text}")
            if share is None:
                continue
            if gate := GATE.fullmatch(name):
                lines["gate"].append((taken, share, gate["tau"]))
            elif name.endswith(" by use"):
                lines["use"].append((taken, share, name.split()[3]))
        if not lines["gate"]:
            raise ConfigError(f"The result has no share of the KL recovered by a gate on {text}.")
        found[text] = {kind: sorted(line) for kind, line in lines.items()}
    return found


def recovered(result: Result) -> str:
    """Return the plot of a result."""
    return draw(points(result))


def draw(found: dict[str, dict[str, list[Point]]]) -> str:
    """Return an SVG document."""
    width, height = LEFT + WIDTH + RIGHT, TOP + HEIGHT + BOTTOM
    most = max(x for lines in found.values() for line in lines.values() for x, _, _ in line)

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + WIDTH * (x - 1) / max(most - 1, 1e-9), TOP + HEIGHT * (1 - y)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for percent in (0, 25, 50, 75, 100):
        _, y = place(1, percent / 100)
        parts.append(f'<path d="M{LEFT} {y:g}H{LEFT + WIDTH}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:g}" text-anchor="end">{percent}</text>')
    for half in range(2, int(2 * most) + 1):
        x, _ = place(half / 2, 0)
        parts.append(f'<path d="M{x:.1f} {TOP}V{TOP + HEIGHT}" stroke="#dddddd"/>')
        below = TOP + HEIGHT + 16
        parts.append(f'<text x="{x:.1f}" y="{below}" text-anchor="middle">{half / 2:g}</text>')
    parts += [
        f'<text x="{LEFT + WIDTH / 2:g}" y="{height - 14}" text-anchor="middle">'
        "passes a token</text>",
        f'<text transform="translate(20 {TOP + HEIGHT / 2:g}) rotate(-90)" text-anchor="middle">'
        "% of the lost KL recovered</text>",
    ]
    for number, (text, lines) in enumerate(found.items()):
        colour = TEXTS[text]
        where = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y, _ in lines["gate"])
        parts.append(f'<polyline points="{where}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for kind, line in lines.items():
            for x, y, label in line:
                at, high = place(x, y)
                shape = f'cx="{at:.1f}" cy="{high:.1f}" r="3.5" stroke="{colour}"'
                parts.append(f'<circle {shape} fill="{colour if kind == "gate" else "#ffffff"}"/>')
                # Two kinds of text side by side would print over each other.
                dx, dy = (8 + 34 * number, 4) if kind == "use" else (5, 16 if number else -8)
                where = f'x="{at + dx:.1f}" y="{high + dy:.1f}" fill="{colour}"'
                parts.append(f"<text {where}>{label}</text>")
        parts.append(f'<text x="{LEFT + number * 110}" y="20" fill="{colour}">{text} texts</text>')
    parts.append(f'<text x="{LEFT + 220}" y="20">● gate, by tau   ○ no gate, by size</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
