import pytest

from moet_cli.phases import FIRST_PHASE, later_phase
from moet_cli.server_log import LogFollower, error_lines


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "server.log"
    path.touch()
    follower = LogFollower(path)
    yield path.open("ab", buffering=0), follower
    follower.close()


class TestFollower:
    def test_lines_come_when_they_are_complete(self, log):
        file, follower = log
        with file:
            file.write(b"one\ntw")
            assert follower.lines() == ["one"]
            assert follower.lines() == []
            file.write(b"o\n\n")
            assert follower.lines() == ["two"]

    def test_colours_and_progress_bars_become_lines(self, log):
        file, follower = log
        with file:
            file.write(b"\x1b[1;36m(Worker pid=1)\x1b[0m 10%\r20%\r\nend \xff\n")
            assert follower.lines() == ["(Worker pid=1) 10%", "20%", "end \ufffd"]


class TestErrors:
    def test_exceptions_come_before_other_errors_and_once(self):
        lines = [
            "(Worker pid=1) ERROR 12-01 [core.py:1] moet_core.errors.TensorError: NaN at row 3",
            "ERROR something",
            "(Engine pid=2) ERROR [core.py:1] moet_core.errors.TensorError: NaN at row 3",
            "RuntimeError: Engine core initialization failed.",
        ]
        assert error_lines(lines) == [
            "moet_core.errors.TensorError: NaN at row 3",
            "RuntimeError: Engine core initialization failed.",
        ]

    def test_what_a_warning_quotes_is_no_error(self):
        lines = ["WARNING 12-01 can cause OSError: too many files", "RuntimeError: it broke"]
        assert error_lines(lines) == ["RuntimeError: it broke"]

    def test_without_an_exception_the_loggers_errors(self):
        assert error_lines(["fine", "ERROR 12-01 no space", "fine"]) == ["ERROR 12-01 no space"]

    def test_without_any_error_the_last_lines(self):
        assert error_lines([str(n) for n in range(9)], most=2) == ["7", "8"]

    def test_of_many_the_first_and_the_last(self):
        lines = [f"ValueError: {n}" for n in range(9)]
        assert error_lines(lines, most=3) == ["ValueError: 0", "ValueError: 7", "ValueError: 8"]


class TestPhases:
    def test_lines_move_it_forward_only(self):
        phase = later_phase(FIRST_PHASE, "INFO Starting to load model /m...")
        assert phase == "loading and converting weights"
        assert later_phase(phase, "INFO Resolved architecture: Glm4Moe") == phase
        assert later_phase(phase, "INFO GPU KV cache size: 9 tokens") == "setting up the KV cache"

    def test_other_lines_do_not_move_it(self):
        assert later_phase(FIRST_PHASE, "INFO hello") == FIRST_PHASE
