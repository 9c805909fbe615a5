"""The logic of a run on a GPU, with a fake driver in the place of NVIDIA's."""

import json
import os
import runpy
import subprocess
import sys
import threading
import types
from collections import Counter
from pathlib import Path

import pytest

from moet_kernels.sass.arch import SM90A
from moet_kernels.sass.bundle import add_kernel, new_plan, plan_faults, write_case
from moet_kernels.sass.cases import copy_case
from moet_kernels.sass.cubin import Cubin
from moet_kernels.sass.gpu.case import Image, read_plan
from moet_kernels.sass.gpu.driver import Device, DriverError
from moet_kernels.sass.gpu.run import run_bundle
from moet_kernels.sass.gpu.task import Clock, crashed_at, run_task
from moet_kernels.sass.gpu.tasks import task_rows
from moet_kernels.sass.operands import parse
from moet_kernels.sass.table import committed_table

HERE = Path(__file__).parent
FAKE_DRIVER = HERE / "fake_gpu/cuda/bindings/driver.py"
TWIN = (HERE / "data/copy.sm_90a.cubin").read_bytes()
LOOP = "IADD3 R3, R0, R2, RZ"
WORK = "STG.E.128 desc[UR8][R20.64], R8"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """The copy kernel with one case, and the faults of its last eight instructions."""
    folder = tmp_path_factory.mktemp("bundle")
    table = committed_table(SM90A)
    plan = new_plan(table)
    programs = add_kernel(plan, folder, "copy", TWIN, None, table)
    case = copy_case(300, 1, 0)
    plan["cases"] = [write_case(folder, "copy", "copy-300", case, repeat=True)]
    plan["times"] = [
        {
            "kernel": "copy",
            "name": "4 KiB",
            "grid": (1, 1, 1),
            "threads": 256,
            "inputs": [(4096, 0, 256)],
            "output_bytes": 4096,
            "numbers": [256],
            "moved_bytes": 8192,
        }
    ]
    tuned = {key: program for key, program in programs.items() if key[1] == "tuned"}
    found = plan_faults(plan, folder, tuned, table)
    plan["faults"] = [fault for fault in found if fault["index"] >= 30]
    plan["fault_batch"] = 4
    plan["one_ops"] = {
        "file": "copy-300.npz",
        "cubin": "copy.twin.cubin",
        "names": [],
        "seeds": 1,
        "threads": 32,
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def hexadecimal(text):
    return f"{committed_table(SM90A).encode(parse(text, SM90A)):x}"


@pytest.fixture
def run(bundle, tmp_path, monkeypatch, capsys):
    """Run the bundle on a fake GPU with the given faults; returns each part, and what was said.

    Tasks run here, one at a time, each with a new driver: processes would take seconds.
    """
    one, unreached = threading.Lock(), set()

    def start(folder, name, arguments, clock, _seconds):
        rows = []
        if clock.left() <= 0 or name in unreached:
            return {"outcome": "no time left", "rows": rows, "error": None}
        with one, monkeypatch.context() as patch:
            patch.setitem(sys.modules, "cuda.bindings", bindings := types.ModuleType("bindings"))
            patch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
            bindings.driver = types.SimpleNamespace(**runpy.run_path(str(FAKE_DRIVER)))
            try:
                rows.extend(json.loads(json.dumps(r)) for r in task_rows(folder, name, arguments))
            except DriverError as error:
                return {"outcome": "crashed", "rows": rows, "error": str(error)}
        return {"outcome": "ok", "rows": rows, "error": None}

    def go(seconds=100, late=(), **faults):
        unreached.update(late)
        monkeypatch.setenv("FAKE_GPU", json.dumps(faults))
        run_bundle(bundle, tmp_path / "out", seconds, start)
        return read_parts(tmp_path / "out"), capsys.readouterr().out

    return go


def read_parts(out):
    return {path.stem: json.loads(path.read_text())["found"] for path in out.glob("*.json")}


def outcomes(parts):
    return {row["variant"]: row["outcome"] for row in parts["own"]}


def test_all_is_well(run, monkeypatch):
    launches, launch = Counter(), Device.launch

    def counted(device, function, *rest):
        launches[function] += 1
        launch(device, function, *rest)

    monkeypatch.setattr(Device, "launch", counted)
    parts, said = run()
    assert min(sorted(launches.values())[-2:]) >= 1000  # safe and tuned
    assert outcomes(parts) == {"twin": "ok", "safe": "ok", "tuned": "ok"}
    assert "copy tuned: 1 cases, 0 bytes differ from the emulator" in said
    assert parts["broken"] == []
    often = {row["variant"]: row["rows"][-1] for row in parts["often"]}
    wanted = {"case": "copy-300", "launches": 1000, "unequal": 0}
    assert often == {"safe": wanted, "tuned": wanted}
    (timed,) = parts["times"]["rows"]
    assert {name: len(samples) for name, samples in timed["microseconds"].items()} == {
        "twin": 40,
        "safe": 40,
        "tuned": 40,
    }
    assert {row["outcome"] for row in parts["faults"]} == {"same"}
    assert parts["machine"]["rows"] == [{"gpu": "Fake GPU", "cuda": 13000}]


def test_the_first_instruction_that_is_not_taken_is_named(run):
    parts, said = run(illegal=[hexadecimal(LOOP)])
    assert outcomes(parts) == {"twin": "ok", "safe": "crashed", "tuned": "crashed"}
    assert "copy safe: crashed in case copy-300" in said
    assert "CUDA_ERROR_ILLEGAL_INSTRUCTION" in said
    for broken in parts["broken"]:
        assert (broken["index"], broken["instruction"]) == (12, LOOP)
        assert broken["without_it"]["outcome"] == "ok"
    assert f"copy tuned first fails at: {LOOP} at 0x00c0" in said
    assert parts["often"] == []
    assert parts["faults"] == []
    assert list(parts["times"]["rows"][0]["microseconds"]) == ["twin"]


def test_the_first_of_two_is_named(run):
    parts, _ = run(illegal=[hexadecimal(WORK), hexadecimal(LOOP)])
    assert {broken["instruction"] for broken in parts["broken"]} == {LOOP}
    assert {broken["without_it"]["outcome"] for broken in parts["broken"]} == {"crashed"}


def test_a_container_that_is_not_taken_is_told_from_the_code(run):
    lone_exit = hexadecimal("EXIT")
    parts, said = run(illegal=[lone_exit])
    assert {broken["cut"] for broken in parts["broken"]} == {0}
    assert "first fails at: the container: even a lone EXIT fails" in said


def test_register_counts_are_tried_around_the_linked_one(run):
    parts, _ = run(least_count=41)
    assert {row["more_than_linked"]: row["outcome"] for row in parts["registers"]} == {
        -3: "crashed",
        -2: "crashed",
        -1: "ok",
        0: "ok",
        64: "ok",
    }
    assert [row["count"] for row in parts["registers"]] == [39, 40, 41, 42, 106]


def test_wrong_results_are_counted_and_never_launched_a_thousand_times(run):
    parts, said = run(spoilt=True)
    assert outcomes(parts) == {"twin": "ok", "safe": "ok", "tuned": "ok"}
    different = {row["variant"]: row["rows"][-1]["different"] for row in parts["own"]}
    assert 4700 < different["safe"] <= 4800  # what was poisoned before
    assert f"copy safe: 1 cases, {different['safe']} bytes differ" in said
    assert (parts["often"], parts["broken"]) == ([], [])


def test_a_crash_among_the_faults_costs_that_fault_alone(run, bundle):
    plan = json.loads((bundle / "plan.json").read_text())
    crashing = plan["faults"][1]
    # The fake GPU ignores control fields, so one fault gets a word of its own.
    word = int.from_bytes(bytes.fromhex(crashing["word"]), "little") ^ 1 << 90
    crashing["word"] = word.to_bytes(16, "little").hex()
    before = (bundle / "plan.json").read_text()
    (bundle / "plan.json").write_text(json.dumps(plan))
    try:
        illegal = word & ~(((1 << 17) - 1) << 105)
        parts, _ = run(illegal=[f"{illegal:x}"])
    finally:
        (bundle / "plan.json").write_text(before)
    found = {row["fault"]: row["outcome"] for row in parts["faults"]}
    assert sorted(found) == list(range(len(plan["faults"])))
    assert [fault for fault, outcome in found.items() if outcome == "crashed"] == [1]
    assert set(found.values()) == {"same", "crashed"}


def test_a_twin_that_crashes_is_not_explained(run):
    parts, _ = run(least_count=200)
    assert set(outcomes(parts).values()) == {"crashed"}
    assert {broken["variant"] for broken in parts["broken"]} == {"safe", "tuned"}


@pytest.mark.parametrize(
    ("outcome", "rows", "wanted"),
    [
        ("ok", [{"begun": 3}], None),
        ("crashed", [{"begun": 3}], 3),
        ("hung", [{"begun": 2}, {"case": "c"}], None),
        ("crashed", [], None),
    ],
)
def test_where_a_task_ended(outcome, rows, wanted):
    assert crashed_at({"outcome": outcome, "rows": rows}) == wanted


def test_a_run_that_ends_early_says_what_it_did_not_reach(run):
    parts, said = run(seconds=100, late=["once"])
    assert set(outcomes(parts).values()) == {"no time left"}
    assert "copy safe: no time left before its first case" in said


def test_a_run_without_a_gpu_ends_at_once(run):
    parts, said = run(seconds=0)
    assert list(parts) == ["machine"]
    assert said.splitlines()[-1] == "no GPU: no time left"


def test_every_part_says_when_it_ran(run, tmp_path):
    run()
    for path in (tmp_path / "out").glob("*.json"):
        record = json.loads(path.read_text())
        assert record["started"] <= record["finished"]


def test_a_changed_cubin_differs_only_where_it_is_changed(bundle):
    image = Image(bundle, read_plan(bundle), "copy", "tuned")
    words = Cubin(image.data).words("copy")
    count = len(image.texts)
    cut = Cubin(image.cut(12)).words("copy")
    assert (cut[:12], cut[count:]) == (words[:12], words[count:])
    assert {word & 0xFFFF for word in cut[12:count]} == {0x794D}
    assert Cubin(image.with_registers(99)).registers("copy") == 99
    assert image.registers == 42
    without = Cubin(image.without(3)).words("copy")
    assert [i for i, word in enumerate(without) if word != words[i]] == [3]


class TestProcesses:
    @pytest.fixture
    def started(self, bundle, monkeypatch):
        """Start one task in a process of its own, with a fake GPU."""
        folders = (HERE / "fake_gpu", HERE.parents[1] / "src", HERE.parents[2] / "moet-core/src")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))

        def start(name, *arguments, seconds=30, **faults):
            monkeypatch.setenv("FAKE_GPU", json.dumps(faults))
            return run_task(bundle, name, list(arguments), Clock(100), seconds)

        return start

    def test_a_task_gives_its_rows(self, started):
        found = started("once", "copy", "safe")
        assert (found["outcome"], found["error"]) == ("ok", None)
        assert found["rows"][-1]["different"] == 0

    def test_a_crash_keeps_the_rows_before_it(self, started):
        found = started("cut", "copy", "tuned", illegal=[hexadecimal(LOOP)])
        assert found["outcome"] == "crashed"
        assert [row["begun"] for row in found["rows"]] == list(range(14))
        assert found["error"].endswith("CUDA_ERROR_ILLEGAL_INSTRUCTION")

    def test_what_hangs_is_ended(self, started):
        found = started("once", "copy", "safe", seconds=0.01)
        assert (found["outcome"], found["error"]) == ("hung", None)

    def test_usage(self, bundle):
        command = [sys.executable, "-m", "moet_kernels.sass.gpu", bundle]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert "BUNDLE OUT" in done.stderr
