import json

import msgspec
import pytest

from moet_core.results import Result
from moet_kernels.sass.errors import SassError
from moet_kernels.sass.record import results_of

FIRST, LAST = "2026-01-02T03:04:05+00:00", "2026-01-02T03:04:59+00:00"
MACHINE = {
    "cpu": "a cpu",
    "cores": 4,
    "memory_bytes": 1 << 30,
    "kernel": "Linux 6",
    "driver": "580",
    "outcome": "ok",
    "rows": [{"gpu": "A GPU", "cuda": 13000}],
    "error": None,
}
PLAN = {
    "commit": {"id": "ab" * 20, "dirty": False},
    "versions": {"ptxas": "13"},
    "one_ops": {"opcodes": {"add": ["FADD", "LDG"], "mul": ["FMUL", "LDG"]}},
    "faults": [
        {
            "kernel": "copy",
            "variant": "tuned",
            "kind": "wait removed",
            "index": index,
            "text": "EXIT",
            "was": "a",
            "now": "b",
            "found": found,
        }
        for index, found in enumerate((1, 0, 0))
    ],
}
PARTS = {
    "machine": MACHINE,
    "own": [
        {
            "kernel": "copy",
            "variant": "safe",
            "outcome": "ok",
            "rows": [
                {"begun": "c"},
                {"case": "c", "bytes": 9, "different": 2, "relative_error": None},
                {"case": "d", "bytes": 9, "different": 0, "relative_error": 0.25},
            ],
        },
        {"kernel": "copy", "variant": "tuned", "outcome": "crashed", "rows": [{"begun": "c"}]},
    ],
    "broken": [{"kernel": "copy", "variant": "tuned", "said": "FROB at 0x0010"}],
    "registers": [
        {"kernel": "copy", "more_than_linked": -2, "outcome": "crashed", "rows": []},
        {"kernel": "copy", "more_than_linked": 0, "outcome": "ok", "rows": [{"different": 0}]},
        {"kernel": "copy", "more_than_linked": 64, "outcome": "ok", "rows": [{"different": 1}]},
    ],
    "often": [
        {
            "kernel": "copy",
            "variant": "safe",
            "outcome": "ok",
            "rows": [{"begun": "c"}, {"case": "c", "launches": 1000, "unequal": 3}],
        }
    ],
    "times": {
        "rows": [
            {
                "kernel": "copy",
                "name": "1 GiB",
                "moved_bytes": 4_000_000,
                "microseconds": {"twin": [2.0, 4.0]},
                "device_copy": {"bytes": 6_000_000, "microseconds": [2.0]},
            }
        ]
    },
    "one_ops": {
        "rows": [
            {"name": "add", "cases": 10, "mismatches": 1},
            {"name": "mul", "cases": 5, "mismatches": 0},
        ]
    },
    "faults": [
        {"fault": 0, "outcome": "wrong"},
        {"fault": 1, "outcome": "crashed"},
        {"fault": 2, "outcome": "same"},
    ],
}


@pytest.fixture
def write(tmp_path):
    def write_run(plan=PLAN, **changed):
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        for name, found in (PARTS | changed).items():
            record = {"started": FIRST, "finished": LAST, "found": found}
            (tmp_path / f"{name}.json").write_text(json.dumps(record))
        return tmp_path

    return write_run


def medians(result):
    return {found.name: found.median for found in result.measurements}


def test_own_kernels(write):
    folder = write()
    found = medians(results_of(folder, folder)["sass-own"])
    assert found == {
        "copy safe: ran all cases": 1,
        "copy safe: bytes unlike the emulator's": 1,
        "copy safe: relative error": 0.25,
        "copy tuned: ran all cases": 0,
        "copy safe, -2 registers: right": 0,
        "copy safe, +0 registers: right": 1,
        "copy safe, +64 registers: right": 0,
        "copy safe: many launches ended": 1,
        "copy safe: launches": 1000,
        "copy safe: unequal launches": 3,
        "copy twin, 1 GiB": 3.0,
        "copy twin, 1 GiB: moved": 1.5,
        "device copy beside copy": 3.0,
    }


def test_an_opcode_has_the_cases_of_all_its_kernels(write):
    folder = write()
    assert medians(results_of(folder, folder)["sass-one-op"]) == {
        "words: FADD, compared": 10,
        "words: FADD, unlike": 1,
        "words: FMUL, compared": 5,
        "words: FMUL, unlike": 0,
        "words: LDG, compared": 15,
        "words: LDG, unlike": 1,
    }


def test_faults_and_misses(write):
    folder = write()
    result = results_of(folder, folder)["sass-faults"]
    assert medians(result) == {
        "copy tuned: crashed, not found": 1,
        "copy tuned: same, not found": 1,
        "copy tuned: wrong, found": 1,
    }
    missed = [note for note in result.notes if note.startswith("Missed")]
    assert missed == ["Missed: copy tuned at 0x0010 `EXIT`: wait removed, a to b, crashed."]


def test_where_and_when(write):
    folder = write()
    for result in results_of(folder, folder).values():
        assert result.started.isoformat() == FIRST
        assert result.finished.isoformat() == LAST
        assert (result.commit.dirty, result.machine.gpus) == (False, ("A GPU",))
        assert msgspec.json.decode(msgspec.json.encode(result), type=Result) == result
    assert "copy tuned: FROB at 0x0010" in results_of(folder, folder)["sass-own"].notes


@pytest.mark.parametrize("commit", [None, {"id": "ab" * 20, "dirty": True}])
def test_a_changed_checkout_is_refused(write, commit):
    folder = write(PLAN | {"commit": commit})
    with pytest.raises(SassError, match="changed checkout"):
        results_of(folder, folder)


def test_a_run_without_a_gpu_is_refused(write):
    folder = write(machine=MACHINE | {"rows": [], "outcome": "crashed", "error": "NO_DEVICE"})
    with pytest.raises(SassError, match="no GPU: NO_DEVICE"):
        results_of(folder, folder)


def test_a_missing_part_is_named(write):
    folder = write()
    (folder / "often.json").unlink()
    with pytest.raises(SassError, match=r"often\.json cannot be read"):
        results_of(folder, folder)
