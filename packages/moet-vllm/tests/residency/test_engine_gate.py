"""The two ends of the gate inside real vLLM engines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

BENCH = Path(__file__).parents[4] / "bench"
SECONDS = 900


@pytest.mark.parametrize(
    "layout",
    [
        ["--pools", "half", "--fine", "minimum", "--stores", "arena"],
        ["--pools", "all", "--fine", "half", "--stores", "pinned", "--tensor-parallel", "2"],
    ],
    ids=["one rank", "tensor parallel"],
)
def test_always_is_fp4_and_never_is_2_bit(layout: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, str(BENCH / "gate/identity.py"), "--out", str(out), *layout],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env=os.environ | {"PYTHONPATH": str(BENCH)},
    )
    assert out.exists(), done.stdout[-3000:] + done.stderr[-6000:]
    records = json.loads(out.read_text())["records"]
    assert [record for record in records if not record["same"]] == []
    fires = dict.fromkeys(("always", "never", "set to always", "set to never"), 0)
    for record in records:
        fires[record["end"]] += sum(gate["fires"] for gate in record["gate"])
    assert min(fires["always"], fires["set to always"]) >= 35
    assert fires["never"] == fires["set to never"] == 0
