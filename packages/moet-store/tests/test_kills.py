"""Writers that are killed at random, and files that lost their end."""

import os
import random
import signal
import socket
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
    """Write the pack without interruption; returns its folder's bytes and the seconds it takes."""
    taken = []
    for number in range(10):
        folder = memory / f"whole-{number}"
        folder.mkdir()
        begin = time.perf_counter()
        write_all(folder, spec, rows_of)
        taken.append(time.perf_counter() - begin)
    # The fastest is the one that nothing else on the machine delayed.
    return folder_bytes(folder), min(taken)


def write_all(folder, spec, rows_of):
    with PackWriter(folder, spec) as writer:
        for layer in writer.missing:
            writer.write_layer(layer, rows_of(spec, layer))
    return writer.path


def write_and_be_killed(folder, spec, rows_of, rows, seconds):
    """Start a writer and kill it in its work; returns whether the kill came in time.

    It waits for its killer after a number of rows: how far the clock alone lets it come is up to
    the load of the machine.

    Args:
        rows: How many rows it has written when its killer comes.
        seconds: How much longer it lives.
    """
    here, there = socket.socketpair()
    child = os.fork()
    if not child:
        here.close()
        left = rows

        def waiting(spec, layer):
            nonlocal left
            for row in rows_of(spec, layer):
                if not left:
                    there.send(b"!")
                    there.recv(1)
                left -= 1
                yield row

        status = 1
        try:
            write_all(folder, spec, waiting)
            status = 0
        finally:
            os._exit(status)
    there.close()
    with here:
        # Nothing to read is its end: it had fewer rows to write.
        if here.recv(1):
            here.send(b"!")
            # No sleep: a loaded machine would wake its killer when all is written.
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                pass
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), f"the writer failed: wait status {status}"
    return os.WIFSIGNALED(status)


def test_killed_writers_leave_packs_that_resume(
    folder, spec, rows_of, whole, folder_bytes, record_testsuite_property
):
    expected, seconds = whole
    chance = random.Random(4)
    kills, folders, resumed = 0, 0, 0
    row_count = len(spec.layers) * spec.experts
    while kills < KILLS:
        pack = folder / str(folders)
        pack.mkdir()
        folders += 1
        # Several writers die on one pack; each starts from what the one before left.
        while write_and_be_killed(
            pack, spec, rows_of, chance.randrange(row_count), chance.uniform(0, seconds / 4)
        ):
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
