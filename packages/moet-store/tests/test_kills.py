"""Writers that are killed at random, and files that lost their end."""

import os
import random
import signal
import tempfile
import time
from pathlib import Path

import pytest

from moet_store import PackWriter, open_pack
from moet_store.manifest import manifest_path

KILLS = 200
TRUNCATIONS = 200


@pytest.fixture(scope="module")
def spec(make_spec):
    return make_spec(layers=tuple(range(4)), experts=2)


@pytest.fixture(scope="module")
def memory():
    """Return a folder in memory where there is one: what a kill leaves behind is the same there.

    The kernel keeps what a killed process wrote, synced or not, on every file system; thousands of
    syncs of a drive would only take minutes.
    """
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


@pytest.fixture
def folder(memory, request):
    made = memory / request.node.name
    made.mkdir()
    return made


@pytest.fixture(scope="module")
def whole(memory, spec, rows_of, folder_bytes):
    """Write the pack without interruption; returns its folder's bytes and the seconds it took.

    A process of its own writes it, as those that are killed: a fork of a large process is slow at
    first, since the two share their memory until one of them writes to it.
    """
    folder = memory / "whole"
    folder.mkdir()
    child = start_writer(folder, spec, rows_of)
    begin = time.perf_counter()
    assert os.waitpid(child, 0)[1] == 0
    return folder_bytes(folder), time.perf_counter() - begin


def write_all(folder, spec, rows_of):
    with PackWriter(folder, spec) as writer:
        for layer in writer.missing:
            writer.write_layer(layer, rows_of(spec, layer))
    return writer.path


def start_writer(folder, spec, rows_of):
    """Start a writer in a process of its own; returns its id once it is about to write."""
    ready, begins = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.write(begins, b"!")
            write_all(folder, spec, rows_of)
            status = 0
        finally:
            os._exit(status)
    os.read(ready, 1)
    os.close(ready)
    os.close(begins)
    return child


def write_and_be_killed(folder, spec, rows_of, seconds):
    """Start a writer and kill it after a while; returns whether the kill came in time."""
    child = start_writer(folder, spec, rows_of)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_killed_writers_leave_packs_that_resume(
    folder, spec, rows_of, whole, folder_bytes, record_testsuite_property
):
    expected, seconds = whole
    chance = random.Random(4)
    kills, folders, resumed = 0, 0, 0
    while kills < KILLS:
        pack = folder / str(folders)
        pack.mkdir()
        folders += 1
        # Several writers die on one pack; each starts from what the one before left.
        while write_and_be_killed(pack, spec, rows_of, chance.uniform(0, seconds / 2)):
            kills += 1
            with PackWriter(pack, spec) as writer:
                resumed += len(writer.missing) < len(spec.layers)
                path = writer.path
            # Whatever it names is whole.
            open_pack(path, spec)
        write_all(pack, spec, rows_of)
        assert folder_bytes(pack) == expected
    record_testsuite_property("kills", kills)
    record_testsuite_property("packs", folders)
    record_testsuite_property("resumed with finished layers", resumed)
    assert resumed > KILLS // 10


def test_truncated_packs_resume(folder, spec, rows_of, whole, folder_bytes):
    expected, _ = whole
    chance = random.Random(5)
    path = write_all(folder, spec, rows_of)
    for number in range(TRUNCATIONS):
        victim = manifest_path(path) if number % 4 == 0 else path
        os.truncate(victim, chance.randrange(victim.stat().st_size))
        write_all(folder, spec, rows_of)
        assert folder_bytes(folder) == expected


def test_a_truncated_pack_names_only_layers_that_are_whole(folder, spec, rows_of):
    path = write_all(folder, spec, rows_of)
    os.truncate(path, spec.offset(2, 1))
    with PackWriter(folder, spec) as writer:
        assert writer.missing == (2, 3)


@pytest.mark.parametrize("lost", ["pack", "manifest", "both"])
def test_packs_that_lost_a_file_resume(folder, spec, rows_of, whole, folder_bytes, lost):
    path = write_all(folder, spec, rows_of)
    if lost in ("pack", "both"):
        path.unlink()
    if lost in ("manifest", "both"):
        manifest_path(path).unlink()
    write_all(folder, spec, rows_of)
    assert folder_bytes(folder) == whole[0]
