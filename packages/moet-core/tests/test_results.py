import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from moet_core.errors import ConfigError
from moet_core.results import (
    Command,
    Commit,
    Machine,
    Measurement,
    Result,
    measurement,
    read_result,
    recorded_command,
    write_result,
)


def make_result(**changes):
    result = Result(
        kind="serve",
        recipe="demo",
        suite="quick",
        started=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        finished=datetime(2026, 1, 2, 3, 5, 6, tzinfo=UTC),
        commit=Commit(id="a" * 40, dirty=True),
        versions={"python": "3.11.7"},
        machine=Machine(cpu="a cpu", cores=2, memory_bytes=2**30, kernel="Linux 6"),
        command=Command(argv=("moet", "bench"), server=("python", "-m", "server")),
        measurements=(measurement("decode", "tokens/s", [3, 1, 2]),),
        notes=("random weights",),
    )
    return msgspec.structs.replace(result, **changes)


def write_json(path: Path, **changes) -> Path:
    fields = msgspec.to_builtins(make_result()) | changes
    path.write_text(json.dumps(fields))
    return path


class TestMeasurement:
    def test_summarises_its_samples(self):
        found = measurement("decode", "tokens/s", [4.0, 1.0, 3.0, 2.0])
        assert (found.median, found.min, found.max) == (2.5, 1.0, 4.0)
        assert found.samples == (4.0, 1.0, 3.0, 2.0)

    def test_no_samples_is_an_error(self):
        with pytest.raises(ValueError, match="'decode' has no samples"):
            measurement("decode", "tokens/s", [])

    def test_a_summary_that_is_not_its_samples_is_an_error(self):
        with pytest.raises(ValueError, match=r"are \(9, 1, 2\), its samples say \(1.5, 1, 2\)"):
            Measurement("decode", "tokens/s", (1, 2), 9, 1, 2)


class TestFile:
    def test_reads_back_what_was_written(self, tmp_path):
        result = make_result()
        write_result(tmp_path / "new" / "r.json", result)
        assert read_result(tmp_path / "new" / "r.json") == result

    def test_times_are_utc_iso(self, tmp_path):
        write_result(tmp_path / "r.json", make_result())
        assert json.loads((tmp_path / "r.json").read_text())["started"] == "2026-01-02T03:04:05Z"

    def test_a_time_without_zone_is_an_error(self):
        with pytest.raises(ValueError, match="need a time zone"):
            Result(**(msgspec.structs.asdict(make_result()) | {"started": datetime(2026, 1, 1)}))

    def test_never_replaces_a_file(self, tmp_path):
        path = tmp_path / "r.json"
        path.write_text("precious")
        with pytest.raises(ConfigError, match=r"r\.json exists already; .*--force"):
            write_result(path, make_result())
        assert path.read_text() == "precious"
        assert list(tmp_path.iterdir()) == [path]

    def test_force_replaces_it(self, tmp_path):
        path = tmp_path / "r.json"
        path.write_text("old")
        write_result(path, make_result(), force=True)
        assert read_result(path) == make_result()
        assert list(tmp_path.iterdir()) == [path]


class TestRefusals:
    def test_missing_file(self, tmp_path):
        with pytest.raises(ConfigError, match="cannot be read: No such file"):
            read_result(tmp_path / "no.json")

    def test_another_schema_version_is_named(self, tmp_path):
        with pytest.raises(ConfigError, match="schema version 99, this moet reads version 1"):
            read_result(write_json(tmp_path / "r.json", schema=99))

    def test_unknown_key_is_named(self, tmp_path):
        with pytest.raises(ConfigError, match=r"not a result file: .*`colour`"):
            read_result(write_json(tmp_path / "r.json", colour="red"))

    def test_a_forged_median_is_refused(self, tmp_path):
        forged = {"name": "d", "unit": "s", "samples": [1.0], "median": 2.0, "min": 1.0, "max": 1.0}
        with pytest.raises(ConfigError, match=r"its samples say \(1.0, 1.0, 1.0\)"):
            read_result(write_json(tmp_path / "r.json", measurements=[forged]))

    def test_not_json(self, tmp_path):
        (tmp_path / "r.json").write_text("{")
        with pytest.raises(ConfigError, match="is not a result file"):
            read_result(tmp_path / "r.json")


def test_a_recorded_command_does_not_name_this_machine_s_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    argv = [f"{sys.prefix}/bin/moet", "--out", f"{tmp_path}/r.json", "/home/somebody/models/x"]
    found = recorded_command(argv, [f"{sys.prefix}/bin/python3", "-m", "server", "--port", "1"])
    assert found.argv == ("moet", "--out", "r.json", "~/models/x")
    assert found.server == ("python3", "-m", "server", "--port", "1")
