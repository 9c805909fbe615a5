from datetime import UTC, datetime
from xml.etree import ElementTree

import pytest
from gate.plot import HEIGHT, LEFT, TOP, WIDTH, points, recovered

from moet_core.errors import ConfigError
from moet_core.results import Command, Machine, Result, measurement

NOW = datetime(2026, 1, 1, tzinfo=UTC)
VALUES = {
    "work a decoded token: W2, passes": 1.0,
    "work a decoded token: gate 0.9, passes": 3.0,
    "work a decoded token: gate 0.5, passes": 2.0,
    "work a decoded token: gate 0.5, fires": 0.3,
    "work a decoded token: fine tier of 25% by use, passes": 1.0,
    "share of the KL recovered: W2, short": 0.0,
    "share of the KL recovered: gate 0.9, short": 1.0,
    "share of the KL recovered: gate 0.5, short": 0.5,
    "share of the KL recovered: fine tier of 25% by use, short": 0.25,
    "share of the KL recovered: gate 0.5, long": 0.75,
    "KL: gate 0.5, long": 0.1,
}


def result_of(values):
    return Result(
        kind="gate-curves",
        recipe=None,
        suite=None,
        started=NOW,
        finished=NOW,
        commit=None,
        versions={},
        machine=Machine(cpu="", cores=1, memory_bytes=1, kernel=""),
        command=Command(()),
        measurements=tuple(measurement(name, "x", [value]) for name, value in values.items()),
    )


def test_points_are_those_of_gates_by_tau_and_of_tiers_by_size():
    assert points(result_of(VALUES)) == {
        "short": {"gate": [(2.0, 0.5, "0.5"), (3.0, 1.0, "0.9")], "use": [(1.0, 0.25, "25%")]},
        "long": {"gate": [(2.0, 0.75, "0.5")], "use": []},
    }


def test_lines_go_through_the_points():
    tree = ElementTree.fromstring(recovered(result_of(VALUES)))
    lines = [line.get("points") for line in tree.iter("{http://www.w3.org/2000/svg}polyline")]
    middle, right = LEFT + WIDTH / 2, LEFT + WIDTH
    assert lines == [
        f"{middle:.1f},{TOP + HEIGHT / 2:.1f} {right:.1f},{TOP:.1f}",
        f"{middle:.1f},{TOP + HEIGHT / 4:.1f}",
    ]
    circles = list(tree.iter("{http://www.w3.org/2000/svg}circle"))
    assert [circle.get("fill") for circle in circles].count("#ffffff") == 1
    assert len(circles) == 4


def test_another_result_is_refused():
    with pytest.raises(ConfigError, match="no share of the KL recovered by a gate on short"):
        recovered(result_of({"decode": 1.0}))
