"""The plugin inside real vLLM engines: memory of loading, stock behaviour, refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moet_vllm.events import MARKER
from moet_vllm.synthetic import Shape, write_checkpoint

pytestmark = pytest.mark.engine

Run = Callable[..., dict[str, Any]]
PROMPTS = [list(range(10, 40)), [200, 7, 99]]


def converted(log: str) -> list[dict[str, Any]]:
    lines = [line.partition(MARKER)[2] for line in log.splitlines() if MARKER in line]
    return [event for event in map(json.loads, lines) if event["event"] == "converted"]


def test_loading_holds_the_planes_and_at_most_two_layers(run_engine: Run, tmp_path: Path) -> None:
    shape = Shape(hidden=512, intermediate=256, layers=7, experts=64)
    path = write_checkpoint(tmp_path / "model", source="nvfp4", shape=shape)
    got = run_engine(path, moet={}, prompts=PROMPTS, tokens=4, measure_load=True)
    assert got["answers"] is not None, got["log"]
    (event,) = converted(got["log"])
    layer = event["bytes_before"] // event["layers"]
    allowed = event["bytes_after"] + 2 * layer
    assert event["peak_staged_bytes"] <= layer
    assert got["load_bytes"] <= allowed, (
        f"wanted at most {allowed:,} bytes (planes {event['bytes_after']:,} + 2 layers of "
        f"{layer:,}), got {got['load_bytes']:,}"
    )


def test_unconfigured_the_plugin_leaves_vllm_as_it_is(
    run_engine: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(tmp_path / "model", source="bf16")
    with_plugin = run_engine(path, prompts=PROMPTS, tokens=32)
    monkeypatch.setenv("VLLM_PLUGINS", "")
    without = run_engine(path, prompts=PROMPTS, tokens=32)
    assert with_plugin["answers"] is not None, with_plugin["log"]
    assert with_plugin["answers"] == without["answers"]
    assert converted(with_plugin["log"]) == []


def test_a_shard_that_is_missing_stops_the_start(run_engine: Run, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", source="nvfp4", shape=Shape(shards=3))
    (path / "model-00002-of-00003.safetensors").unlink()
    got = run_engine(path, moet={})
    assert got["code"] != 0
    assert "are not in the checkpoint" in got["log"], got["log"][-2000:]


def test_random_weights_can_stand_in_for_a_checkpoint(run_engine: Run, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", source="nvfp4")
    got = run_engine(path, moet={}, prompts=PROMPTS, tokens=8, engine={"load_format": "dummy"})
    assert got["answers"] is not None, got["log"]
    assert all(len(answer["tokens"]) == 8 for answer in got["answers"])
    assert len(converted(got["log"])) == 1


@pytest.mark.parametrize(
    ("engine", "moet", "named"),
    [
        ({"enable_expert_parallel": True}, {}, "--enable-expert-parallel"),
        ({}, {"zeross": "sign"}, "zeross"),
    ],
)
def test_what_cannot_be_honoured_stops_the_start(
    run_engine: Run, tmp_path: Path, engine: dict[str, Any], moet: dict[str, Any], named: str
) -> None:
    path = write_checkpoint(tmp_path / "model", source="nvfp4")
    got = run_engine(path, moet=moet, engine=engine)
    assert got["code"] != 0
    assert "ConfigError" in got["log"]
    assert named in got["log"]
