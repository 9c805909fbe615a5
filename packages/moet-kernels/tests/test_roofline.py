"""The plot of docs/kernels.md, drawn from a result made up here."""

import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime

import pytest
from kernels.plot import points, roofline

from moet_core.errors import ConfigError
from moet_core.results import Command, Machine, Result, measurement


def made_up(*measurements, gpus=("NVIDIA <H200>",)):
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    return Result(
        kind="kernels",
        started=moment,
        finished=moment,
        commit=None,
        versions={},
        machine=Machine("cpu", 1, 1, "kernel", gpus),
        command=Command(("moet",)),
        measurements=measurements,
    )


def layer(label, megabytes, microseconds, rate):
    return (
        measurement(f"{label}: bytes", "MB", [megabytes]),
        measurement(f"{label}: layer", "us", [microseconds]),
        measurement(f"{label}: layer, share of read bandwidth", "%", [50]),
        measurement(f"{label}: layer", "TFLOP/s", [rate]),
    )


BANDWIDTH = measurement("read bandwidth", "GB/s", [4000.0])
RESULT = made_up(
    BANDWIDTH,
    *layer("GLM-5.2, w2, 8 tokens", 100.0, 200.0, 40.0),
    *layer("GLM-5.2, w2, 1 token", 50.0, 100.0, 10.0),
)


def test_points_are_operations_a_byte_and_rates():
    bandwidth, found = points(RESULT)
    assert bandwidth == 4e12
    (line,) = found.values()
    assert [tokens for tokens, _, _ in line] == [1, 8]
    # 10 TFLOP/s for 100 us are 1e9 operations on 5e7 bytes
    assert line[0][1:] == pytest.approx((20.0, 10.0))
    assert line[1][1:] == pytest.approx((80.0, 40.0))


def test_the_plot_is_svg_with_a_point_for_each_number_of_tokens():
    drawn = ElementTree.fromstring(roofline(RESULT))
    names = [element.tag.rpartition("}")[2] for element in drawn.iter()]
    assert names.count("circle") == 2
    text = " ".join(element.text or "" for element in drawn.iter())
    assert "NVIDIA <H200>" in text
    assert "4,000 GB/s" in text


def test_a_point_on_the_roof_lies_on_its_line():
    on_it = made_up(BANDWIDTH, *layer("M, w2, 1 token", 100.0, 25.0, 40.0))  # 100 MB in 25 us
    drawn = ElementTree.fromstring(roofline(on_it))
    lines = [e for e in drawn.iter() if e.get("stroke-dasharray")]
    (x0, y0), (x1, y1) = (map(float, p.split(",")) for p in lines[0].get("points").split())
    (circle,) = [e for e in drawn.iter() if e.tag.endswith("circle")]
    x, y = float(circle.get("cx")), float(circle.get("cy"))
    assert y == pytest.approx(y0 + (y1 - y0) * (x - x0) / (x1 - x0), abs=0.5)


def test_other_results_are_refused():
    with pytest.raises(ConfigError, match="needs a result of `moet bench kernels`"):
        roofline(made_up(BANDWIDTH))
