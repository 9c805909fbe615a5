import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

FAKE = Path(__file__).parent / "fake"


@pytest.fixture(autouse=True, scope="session")
def heeded_signals():
    """Undo what a shell does to background jobs: ignored signals would be inherited by moet."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def runs(pid):
    """Tell whether a process runs; one that waits to be reaped by init does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Finished(msgspec.Struct):
    """How a command ended."""

    code: int
    out: str
    err: str

    def objects(self):
        """Return the JSON objects on standard output, where nothing else may be."""
        return [json.loads(line) for line in self.out.splitlines()]


class Cli:
    """Runs `moet` in a process of its own, with the fake server in the place of vLLM's."""

    def __init__(self, folder):
        self.folder = folder
        self.pids = folder / "pids"

    def start(self, *args, mode="", **environment):
        settings = {
            "PYTHONPATH": str(FAKE),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "FAKE_MODE": mode,
            "FAKE_PIDS": str(self.pids),
            "COLUMNS": "200",
        }
        return subprocess.Popen(
            [sys.executable, "-m", "moet_cli", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | settings | environment,
            cwd=self.folder,
        )

    def finish(self, process):
        out, err = process.communicate(timeout=60)
        return Finished(process.returncode, out, err)

    def __call__(self, *args, mode="", **environment):
        return self.finish(self.start(*args, mode=mode, **environment))

    def server_pids(self):
        return [int(pid) for pid in self.pids.read_text().split()] if self.pids.exists() else []

    def all_gone(self, count):
        """Tell whether all of the server's processes are gone, `count` of them."""
        pids = self.server_pids()
        assert len(pids) == count
        return not any(runs(pid) for pid in pids)


@pytest.fixture
def wait_until():
    """Return a function that waits for a condition, but not for ever."""

    def wait(holds):
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.05)

    return wait


@pytest.fixture
def moet(tmp_path):
    return Cli(tmp_path)


@pytest.fixture
def model(tmp_path):
    """Return the folder of a complete checkpoint in two shards."""
    write = runpy.run_path(str(FAKE / "moet_vllm/synthetic.py"))["write_checkpoint"]
    return write(tmp_path / "model")
