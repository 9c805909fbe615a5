"""The roofline plot of docs/kernels.md: speed of layers over operations a byte, as SVG."""

import math
import re
from xml.sax.saxutils import escape

from moet_core.errors import ConfigError
from moet_core.results import Result

__all__ = ["points", "roofline"]

LAYER = re.compile(
    r"(?P<model>[^,]+), (?P<codec>[^,]+), (?P<tokens>\d+) tokens?: (?P<what>bytes|layer)"
)

Points = dict[tuple[str, str], list[tuple[int, float, float]]]
"""By model and codec: (tokens, operations a byte, TFLOP/s), tokens ascending."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#000000")
WIDTH, HEIGHT, LEFT, TOP = 560, 320, 64, 56


def points(result: Result) -> tuple[float, Points]:
    """Return the read bandwidth in bytes a second, and the layers, of `moet bench kernels`.

    Raises:
        ConfigError: the result has no bandwidth or no layer.
    """
    bandwidth, moved, rates = None, {}, {}
    for one in result.measurements:
        if one.name == "read bandwidth":
            bandwidth = 1e9 * one.median
        elif name := LAYER.fullmatch(one.name):
            key = name["model"], name["codec"], int(name["tokens"])
            if name["what"] == "bytes":
                moved[key] = 1e6 * sum(one.samples) / len(one.samples)
            elif one.unit == "TFLOP/s":
                rates[key] = one
    found: Points = {}
    for key in sorted(moved.keys() & rates.keys()):
        model, codec, tokens = key
        seconds = _seconds(result, key)
        operations = 1e12 * rates[key].median * seconds
        point = tokens, operations / moved[key], rates[key].median
        found.setdefault((model, codec), []).append(point)
    if bandwidth is None or not found:
        raise ConfigError(
            "The plot needs a result of `moet bench kernels`, with 'read bandwidth' and layers "
            f"of at least one model; found kind {result.kind!r}, suite {result.suite!r}."
        )
    return bandwidth, found


def _seconds(result: Result, key: tuple[str, str, int]) -> float:
    model, codec, tokens = key
    label = f"{model}, {codec}, {tokens} token{'s' if tokens > 1 else ''}: layer"
    (found,) = [m for m in result.measurements if m.name == label and m.unit == "us"]
    return found.median / 1e6


def roofline(result: Result) -> str:
    """Return an SVG document: both axes logarithmic, the measured bandwidth as the roof."""
    bandwidth, found = points(result)
    every = [point for line in found.values() for point in line]
    low_x, high_x = _decades([x for _, x, _ in every])
    low_y, high_y = _decades([y for _, _, y in every] + [bandwidth * low_x / 1e12])

    def place(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / low_x) / math.log(high_x / low_x)
        up = math.log(y / low_y) / math.log(high_y / low_y)
        return round(LEFT + WIDTH * across, 1), round(TOP + HEIGHT * (1 - up), 1)

    end = min(high_x, high_y * 1e12 / bandwidth)
    roof = [place(low_x, bandwidth * low_x / 1e12), place(end, bandwidth * end / 1e12)]
    width, height = LEFT + WIDTH + 24, TOP + HEIGHT + 24 + 20 * len(found) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20">Expert layers on {escape(_card(result))}: TFLOP/s over '
        "operations for each byte of weights</text>",
        f'<text x="{LEFT}" y="38">line: read bandwidth measured in the same run, '
        f"{bandwidth / 1e9:,.0f} GB/s</text>",
        *_axes(low_x, high_x, low_y, high_y, place),
        _polyline(roof, "#555555", "6 3"),
    ]
    for index, ((model, codec), line) in enumerate(found.items()):
        colour = COLOURS[index % len(COLOURS)]
        places = [place(x, y) for _, x, y in line]
        parts.append(_polyline(places, colour, ""))
        for (tokens, _, _), (x, y) in zip(line, places, strict=True):
            parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>')
            parts.append(f'<text x="{x + 5}" y="{y + 14}" fill="{colour}">{tokens}</text>')
        y = TOP + HEIGHT + 44 + 20 * index
        parts.append(f'<rect x="{LEFT}" y="{y - 9}" width="20" height="4" fill="{colour}"/>')
        label = f"{model}, {codec}; numbers are tokens"
        parts.append(f'<text x="{LEFT + 28}" y="{y}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _card(result: Result) -> str:
    return ", ".join(result.machine.gpus) or "an unnamed card"


def _decades(values: list[float]) -> tuple[float, float]:
    """Return the powers of ten around values, never the same one twice."""
    low = math.floor(math.log10(min(values)))
    return 10.0**low, 10.0 ** max(math.ceil(math.log10(max(values))), low + 1)


def _axes(low_x, high_x, low_y, high_y, place):
    parts = []
    for exponent in range(round(math.log10(low_x)), round(math.log10(high_x)) + 1):
        (x, bottom), (_, top) = place(10.0**exponent, low_y), place(10.0**exponent, high_y)
        parts.append(_polyline([(x, bottom), (x, top)], "#dddddd", ""))
        parts.append(
            f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{10.0**exponent:g}</text>'
        )
    for exponent in range(round(math.log10(low_y)), round(math.log10(high_y)) + 1):
        (left, y), (right, _) = place(low_x, 10.0**exponent), place(high_x, 10.0**exponent)
        parts.append(_polyline([(left, y), (right, y)], "#dddddd", ""))
        parts.append(
            f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{10.0**exponent:g}</text>'
        )
    return parts


def _polyline(places: list[tuple[float, float]], colour: str, dashes: str) -> str:
    listed = " ".join(f"{x:g},{y:g}" for x, y in places)
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{listed}" fill="none" stroke="{colour}"{dash}/>'
