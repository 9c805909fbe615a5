import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moet_cli import cgroup, machine
from moet_cli.memory import MemorySampler, tree_memory
from moet_core.results import Commit

NVIDIA_SMI = """#!/bin/sh
case "$1" in
--query-gpu=index*) echo '0, GPU-aa1, NVIDIA H200, 580.1'; echo '1, GPU-bb2, NVIDIA H200, 580.1';;
--query-gpu=memory.used) echo 100; echo 28;;
esac
"""


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


class TestGpus:
    def test_all_of_them(self, two_gpus):
        assert machine.gpus() == (machine.Gpu("NVIDIA H200", "580.1"),) * 2

    @pytest.mark.parametrize(
        ("shown", "count"), [("", 0), ("1", 1), ("0,1", 2), ("GPU-bb", 1), ("7", 0), ("-1", 0)]
    )
    def test_only_the_visible_ones(self, two_gpus, monkeypatch, shown, count):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert len(machine.gpus()) == count

    def test_memory_in_use(self, two_gpus):
        assert machine.gpu_memory_used() == 128 * 2**20

    def test_none_without_a_driver(self, monkeypatch):
        monkeypatch.setattr(shutil, "which", lambda _: None)
        assert machine.gpus() == ()


class TestCommit:
    @pytest.fixture
    def checkout(self, tmp_path):
        def git(*args):
            identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
            command = ["git", *identity, "-C", str(tmp_path), *args]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        git("init", "-q")
        (tmp_path / "a.py").write_text("1")
        git("add", "a.py")
        git("commit", "-qm", "x")
        return tmp_path / "a.py", git("rev-parse", "HEAD").strip()

    def test_clean(self, checkout):
        file, commit = checkout
        assert machine.find_commit(file) == Commit(id=commit, dirty=False)

    def test_dirty(self, checkout):
        file, commit = checkout
        file.write_text("2")
        assert machine.find_commit(file) == Commit(id=commit, dirty=True)

    def test_a_file_that_only_lies_in_a_checkout_has_none(self, checkout):
        file, _ = checkout
        (file.parent / "installed.py").write_text("1")
        assert machine.find_commit(file.parent / "installed.py") is None


class TestCgroup:
    def test_version_2_counts_cached_files_as_free(self, tmp_path):
        folder = tmp_path / "fs/box"
        folder.mkdir(parents=True)
        (tmp_path / "own").write_text("0::/box\n")
        (folder / "memory.max").write_text("1000\n")
        (folder / "memory.current").write_text("600\n")
        (folder / "memory.stat").write_text("anon 400\ninactive_file 150\n")
        assert cgroup.free_memory(tmp_path / "fs", tmp_path / "own") == 1000 - 600 + 150

    def test_version_1_seen_from_inside_a_container(self, tmp_path):
        folder = tmp_path / "fs/memory"
        folder.mkdir(parents=True)
        (tmp_path / "own").write_text("5:cpu:/x\n4:memory:/docker/abc\n")
        (folder / "memory.limit_in_bytes").write_text("1000\n")
        (folder / "memory.usage_in_bytes").write_text("600\n")
        (folder / "memory.stat").write_text("total_inactive_file 0\n")
        assert cgroup.free_memory(tmp_path / "fs", tmp_path / "own") == 400

    def test_no_limit(self, tmp_path):
        (tmp_path / "own").write_text("0::/\n")
        (tmp_path / "memory.max").write_text("max\n")
        assert cgroup.free_memory(tmp_path, tmp_path / "own") is None

    def test_no_cgroups(self, tmp_path):
        assert cgroup.free_memory(tmp_path, tmp_path / "own") is None

    def test_the_smaller_of_machine_and_cgroup_counts(self, monkeypatch):
        monkeypatch.setattr(cgroup, "free_memory", lambda: 5)
        assert machine.available_memory() == 5


class TestMemory:
    def test_a_tree_counts_its_descendants(self):
        hog = "x = bytearray(50_000_000); print('ready', flush=True); input()"
        parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hog!r}])"
        with subprocess.Popen(
            [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            process.stdout.readline()
            with MemorySampler(process.pid) as memory:
                pass
            process.communicate(b"\n")
        assert 50_000_000 < max(memory.host) < 200_000_000

    def test_a_process_that_is_gone_takes_nothing(self):
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        assert tree_memory(process.pid) == 0


def test_the_description_names_this_machine():
    found = machine.describe_machine()
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.memory_bytes > 2**28
    assert found.cpu in Path("/proc/cpuinfo").read_text()


def test_versions_of_everything_that_takes_part():
    assert machine.installed_versions().keys() == {"moet", "vllm", "torch", "numpy", "python"}
