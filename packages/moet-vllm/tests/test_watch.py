"""A dead child is reported with its signal, and only in a server of ours."""

import subprocess
import sys
from pathlib import Path

import msgspec

from moet_vllm import watch
from moet_vllm.events import MARKER, ProcessEnded

CHILD_DIES = """
import multiprocessing, os, signal, sys, time
from moet_vllm import watch

def child(code):
    time.sleep(0.3)
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)

if __name__ == "__main__":
    watch.POLL_SECONDS = 0.02
    watch.start()
    context = multiprocessing.get_context(sys.argv[1])
    process = context.Process(target=child, args=(int(sys.argv[2]),), name="Worker-7")
    process.start()
    process.join()
    time.sleep(0.3)
"""


def events(folder: Path, method: str, code: int) -> list[ProcessEnded]:
    script = folder / "dies.py"
    script.write_text(CHILD_DIES)
    done = subprocess.run(
        [sys.executable, str(script), method, str(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith(MARKER)]
    return [msgspec.json.decode(line.removeprefix(MARKER), type=ProcessEnded) for line in lines]


def test_a_killed_child_is_reported_with_its_signal(tmp_path: Path) -> None:
    (event,) = events(tmp_path, "fork", -9)
    assert (event.name, event.exitcode, event.signal) == ("Worker-7", -9, "SIGKILL")
    assert event.pid > 0


def test_a_spawned_child_is_watched_too(tmp_path: Path) -> None:
    (event,) = events(tmp_path, "spawn", -11)
    assert (event.exitcode, event.signal) == (-11, "SIGSEGV")


def test_an_exit_code_is_reported_without_a_signal(tmp_path: Path) -> None:
    (event,) = events(tmp_path, "fork", 3)
    assert (event.exitcode, event.signal) == (3, "")


def test_a_child_that_ends_well_is_not_reported(tmp_path: Path) -> None:
    assert events(tmp_path, "fork", 0) == []


def test_a_process_of_another_program_is_not_watched() -> None:
    watch.start_in_server()
    assert watch._watching_pid is None


def test_oom_kills_is_a_count() -> None:
    assert watch.oom_kills() >= 0
