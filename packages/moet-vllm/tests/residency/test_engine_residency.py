"""Pools of experts inside real vLLM engines."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moet_vllm import tinymoe

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[4]
IDENTITY = ROOT / "bench/residency/identity.py"
FAULT_JOB = Path(__file__).with_name("fault_job.py")
SECONDS = 600


def run(command: list[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.mark.parametrize(
    "layout",
    [
        ["--pools", "minimum,all but one", "--stores", "pinned,arena"],
        ["--tensor-parallel", "2", "--pools", "half", "--stores", "pack", "--chunked"],
        ["--pipeline-parallel", "2", "--pools", "quarter", "--stores", "arena"],
    ],
    ids=["one rank", "tensor parallel, chunked", "pipeline parallel"],
)
def test_every_logit_is_that_of_the_engine_with_all_experts(
    layout: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    done = run([IDENTITY, "--out", out, *layout])
    assert out.exists(), done.stdout[-3000:] + done.stderr[-6000:]
    records = json.loads(out.read_text())["records"]
    assert [record for record in records if not record["same"]] == []
    missed = sum(part["missed"] for record in records for part in record["counts"])
    repaired = sum(part["repaired"] for record in records for part in record["counts"])
    assert missed > 1000, "the pools held everything: nothing was tried"
    assert repaired > 100


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("faults")
    out = folder / "out.json"
    done = run([FAULT_JOB, folder / "packs", out])
    assert out.exists(), done.stdout[-3000:] + done.stderr[-6000:]
    return dict(json.loads(out.read_text()))


def test_requests_of_a_step_whose_experts_are_damaged_end_with_an_error(
    faults: dict[str, Any],
) -> None:
    assert [answer["finish"] for answer in faults["clean"]] == ["length", "length"]
    for answer in faults["damaged"] + faults["still damaged"]:
        assert (answer["tokens"], answer["finish"]) == ([], "error")


def test_the_next_requests_are_right_and_find_nothing_of_the_failed_step(
    faults: dict[str, Any],
) -> None:
    assert faults["mended"] == faults["clean"]
    assert faults["all"] == faults["clean"]


def test_an_answer_that_lacks_experts_says_so(faults: dict[str, Any]) -> None:
    (answer,) = faults["degraded"]
    assert answer["finish"] == "length"
    label = answer["label"]["moet"]
    assert label["degraded"] is True
    assert 1 <= label["degraded_steps"] <= 6
    assert all(answer["label"] is None for answer in faults["clean"] + faults["mended"])


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        ({}, "--worker-cls moet_vllm.worker.MoetWorker --scheduler-cls moet_vllm.scheduler"),
        (
            {"worker_cls": "moet_vllm.worker.MoetWorker"},
            "add --scheduler-cls moet_vllm.scheduler.make_scheduler",
        ),
    ],
)
def test_without_its_worker_and_scheduler_a_pool_is_refused(
    run_engine: Callable[..., dict[str, Any]], engine: dict[str, Any], named: str
) -> None:
    got = run_engine(tinymoe.CHECKPOINT, moet={"pool": 0.002}, engine=engine)
    assert got["code"] != 0
    assert "ConfigError" in got["log"]
    assert named in got["log"]


def test_a_pool_below_one_layer_is_refused(run_engine: Callable[..., dict[str, Any]]) -> None:
    classes = {
        "worker_cls": "moet_vllm.worker.MoetWorker",
        "scheduler_cls": "moet_vllm.scheduler.make_scheduler",
    }
    got = run_engine(tinymoe.CHECKPOINT, moet={"pool": 63 * 8192 / 2**30}, engine=classes)
    assert got["code"] != 0
    assert "holds 63 experts; wanted at least one layer of 64" in got["log"]
