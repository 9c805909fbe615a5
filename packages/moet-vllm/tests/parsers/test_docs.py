"""The comparison in docs/parsers.md is what the committed result says."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
SCRIPT = ROOT / "bench/parsers/table.py"


@pytest.mark.skipif(not SCRIPT.exists(), reason="outside the repository")
def test_the_table_has_not_drifted() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
