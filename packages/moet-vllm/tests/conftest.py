"""Shared fixtures: engines run in processes of their own, one at a time."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_oracle import Comparison

JOB = Path(__file__).with_name("engine_job.py")
ENGINE_SECONDS = 300

COMPARISONS = pytest.StashKey[dict[str, Comparison]]()


@pytest.fixture(scope="session")
def comparisons(pytestconfig: pytest.Config) -> dict[str, Comparison]:
    """Return the dict whose comparisons are shown at the end of the run, by what was compared."""
    return pytestconfig.stash.setdefault(COMPARISONS, {})


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Show how the engines' answers compared with stock vLLM's."""
    found = config.stash.get(COMPARISONS, {})
    if found:
        terminalreporter.section("answers against stock vLLM")
    for name, comparison in found.items():
        terminalreporter.write_line(
            f"{name}: {comparison.compared} tokens equal, largest difference in log probability "
            f"{comparison.largest:.4f}, near ties: {'; '.join(comparison.near_ties) or 'none'}"
        )


@pytest.fixture(scope="session")
def run_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Return a function that runs one engine and returns its answers (see engine_job.py)."""

    def run(model: Path, **settings: Any) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("engine")
        job = {
            "model": str(model),
            "moet": None,
            "tensor_parallel": 1,
            "pipeline_parallel": 1,
            "dtype": "bfloat16",
            "prompts": [],
            "tokens": 64,
            **settings,
        }
        (folder / "job.json").write_text(json.dumps(job))
        done = subprocess.run(
            [sys.executable, str(JOB), str(folder / "job.json"), str(folder / "out.json")],
            capture_output=True,
            text=True,
            timeout=ENGINE_SECONDS,
            check=False,
        )
        out = folder / "out.json"
        result = json.loads(out.read_text()) if out.exists() else {"answers": None}
        return {**result, "code": done.returncode, "log": done.stdout + done.stderr}

    return run
