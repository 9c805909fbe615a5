import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from moet_cli.interrupts import Interrupted, raising
from moet_cli.ports import free_port
from moet_cli.supervise import Launch, Server, ServerError

FAKE = Path(__file__).parent / "fake/moet_vllm/server.py"


@pytest.fixture
def make_server(tmp_path):
    """Return a function that makes a fake server with the given faults."""

    def make(*modes, grace=2.0):
        port = free_port("127.0.0.1")
        launch = Launch(
            command=(sys.executable, str(FAKE), "--host", "127.0.0.1", "--port", str(port)),
            environment={"FAKE_MODE": ",".join(modes), "FAKE_PIDS": str(tmp_path / "pids")},
            url=f"http://127.0.0.1:{port}",
            log=tmp_path / "server.log",
        )
        return Server(launch, grace=grace)

    return make


@pytest.fixture
def gone(moet):
    return moet.all_gone


def ignore(_progress):
    pass


class TestReady:
    def test_ready_after_a_token_and_converted_experts(self, make_server, gone):
        with make_server("slow") as server:
            server.wait_ready(30, ignore)
            assert server.converted[0].bytes_after == 1_327_104
            assert server.seconds_to_ready > 1
        assert gone(1)

    def test_progress_is_shown_while_nothing_is_logged(self, make_server):
        seen = []
        with make_server("slow") as server:
            server.wait_ready(30, seen.append)
        phases = list(dict.fromkeys(progress.phase for progress in seen))
        assert phases[-2:] == ["loading and converting weights", "computing a first token"]
        assert max(progress.quiet for progress in seen) > 0.5

    def test_a_server_without_the_plugin_is_refused(self, make_server, gone):
        with (
            make_server("unconverted") as server,
            pytest.raises(ServerError, match="no expert became W2: the moet plugin did not run"),
        ):
            server.wait_ready(30, ignore)
        assert gone(1)

    def test_a_rank_without_converted_experts_is_named(self, make_server):
        with (
            make_server("half") as server,
            pytest.raises(ServerError, match=r"no expert of rank\(s\) \[1\] of 2 became W2"),
        ):
            server.wait_ready(30, ignore)

    def test_health_alone_is_not_ready(self, make_server, gone):
        with (
            make_server("no-step") as server,
            pytest.raises(ServerError, match=r"cannot compute: .*HTTP 500.*EngineDeadError"),
        ):
            server.wait_ready(30, ignore)
        assert gone(1)

    def test_too_slow(self, make_server, gone, tmp_path, wait_until):
        with make_server("silent") as server:
            wait_until(lambda: "load model" in (tmp_path / "server.log").read_text())
            with pytest.raises(
                ServerError, match=r"not ready after 0\.1 s.*loading.*start_timeout"
            ):
                server.wait_ready(0.1, ignore)
            assert gone(1)


class TestDeath:
    def test_an_exception_is_quoted_from_the_log(self, make_server, tmp_path):
        with make_server("crash") as server, pytest.raises(ServerError) as error:
            server.wait_ready(30, ignore)
        assert "ended with exit code 1" in str(error.value)
        assert "\n    ValueError: layer 3 has no experts\n" in str(error.value)
        assert str(tmp_path / "server.log") in str(error.value)

    def test_a_killed_server_is_reported_with_its_signal(self, make_server):
        with (
            make_server("suicide") as server,
            pytest.raises(ServerError, match=r"server \(pid \d+\) was killed by SIGKILL"),
        ):
            server.wait_ready(30, ignore)

    def test_a_dead_worker_ends_a_server_that_hangs(self, make_server, gone):
        with make_server("worker-dies", "stubborn", "family") as server:
            with pytest.raises(ServerError, match=r"VllmWorker-1 \(pid 4242\) was killed by SIG"):
                server.wait_ready(30, ignore)
            assert gone(2)

    def test_a_dead_worker_ends_a_request_that_hangs(self, make_server, gone):
        from moet_cli.probe import first_token

        with make_server("dies-later") as server:
            server.wait_ready(30, ignore)
            start = time.monotonic()
            with pytest.raises(ServerError, match="was killed by SIGKILL"):
                server.watch(lambda: first_token(server.launch.url, 600))
            assert time.monotonic() - start < 10
        assert gone(1)

    def test_oom_kills_are_counted(self, make_server, monkeypatch):
        counts = iter([3, 5])
        monkeypatch.setattr("moet_cli.supervise.oom_kills", lambda: next(counts))
        with (
            make_server("suicide") as server,
            pytest.raises(ServerError, match=r"OOM killer ended 2 process\(es\)"),
        ):
            server.wait_ready(30, ignore)

    def test_a_killed_guard_leaves_no_server_behind(self, make_server, gone):
        with make_server() as server:
            server.wait_ready(30, ignore)
            os.kill(server.pid, signal.SIGKILL)
            with pytest.raises(ServerError, match="guard process was killed"):
                server.wait()
            assert gone(1)


class TestStop:
    def test_descendants_in_other_sessions_are_stopped(self, make_server, gone):
        with make_server("family") as server:
            server.wait_ready(30, ignore)
        assert gone(2)

    def test_what_ignores_sigterm_is_killed_after_the_grace(self, make_server, gone):
        with make_server("stubborn", "family", grace=0.5) as server:
            server.wait_ready(30, ignore)
            start = time.monotonic()
        assert 0.5 <= time.monotonic() - start < 8
        assert gone(2)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_stops_everything_and_is_passed_on(self, make_server, gone, number):
        def serve():
            with raising(), make_server("family") as server:
                server.wait_ready(30, ignore)
                threading.Timer(0.3, os.kill, [os.getpid(), number]).start()
                server.wait()

        with pytest.raises(Interrupted) as caught:
            serve()
        assert caught.value.signum == number
        assert gone(2)
