"""What machines and file systems refuse, and what the store makes of it."""

import ctypes
import errno
import os
import resource
import signal
import struct
import subprocess
import sys
from contextlib import contextmanager

import pytest

from moet_store import ExpertStore, PackErrorKind, PackReader, PackWriter, aligned_buffer
from moet_store.counters import Counters
from moet_store.engines import PoolEngine, open_engine

# Reads every row of a pack and prints engine, direct, fallbacks and rows.
READ_ALL = """
import sys
from pathlib import Path
from moet_store import ExpertStore, PackReader
with ExpertStore(PackReader([Path(sys.argv[1])]), 12) as store:
    reader = store.reader
    ended = store.wait(store.submit(reader.written_keys()))
    assert all(completion.error is None for completion in ended), ended
    print(reader.engine, reader.direct, store.counters().fallback_count, len(store.arena))
"""


def read_all(path, prepare=None):
    """Read a pack in a process of its own; returns its words and its lines on standard error."""
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL, path],
        preexec_fn=prepare,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr.splitlines()


ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000


def filter_calls(system_call, then, otherwise):
    """Filter this process's system calls from now on, as container profiles do."""
    load, jump_equal, ret = 0x20, 0x15, 0x06
    program = b"".join(
        struct.pack("HBBI", *line)
        for line in (
            (load, 0, 0, 0),
            (jump_equal, 0, 1, system_call),
            (ret, 0, 0, then),
            (ret, 0, 0, otherwise),
        )
    )
    code_at = ctypes.create_string_buffer(program)
    filter_ = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code_at))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp, filter_mode = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(seccomp, filter_mode, filter_, 0, 0) == 0


IO_URING_SETUP = 425


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_seccomp_denies_io_uring(make_pack, code):
    path, _ = make_pack()
    words, lines = read_all(path, lambda: filter_calls(IO_URING_SETUP, REFUSE | code, ALLOW))
    assert words == ["pread", "True", "1", "12"]
    (line,) = lines
    assert line.startswith("io_uring is not available: reading with 8 pread threads")
    assert os.strerror(code) in line
    assert ("seccomp profile" in line) == (code == errno.EPERM)


def drop_lock_privilege():
    """Have the program that is executed next do without the right to lock any amount of memory."""
    drop_from_bounding_set, cap_ipc_lock = 24, 14
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(drop_from_bounding_set, cap_ipc_lock, 0, 0, 0):
        # Ordinary users may not drop it, and do not have it.
        assert os.geteuid() != 0


def test_little_lockable_memory(make_pack):
    path, spec = make_pack(experts=40)
    limit = 64 * 1024
    assert 12 * spec.row_bytes > limit

    def prepare():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
        drop_lock_privilege()

    script = READ_ALL.replace(", 12)", ", 120)")
    done = subprocess.run(
        [sys.executable, "-c", script, path],
        preexec_fn=prepare,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["io_uring", "True", "1", "120"]
    (line,) = done.stderr.splitlines()
    assert "limit 64 KiB, need 960" in line
    assert "ulimit -l" in line


@contextmanager
def mounted(folder, *arguments):
    folder.mkdir()
    if os.geteuid():
        pytest.skip("mounting needs root")
    command = ["mount", *arguments, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount is refused here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_tmpfs(tmp_path, make_pack):
    with mounted(tmp_path / "memory", "-t", "tmpfs", "-o", "size=8m", "tmpfs") as folder:
        path, _ = make_pack(folder / "pack")
        words, lines = read_all(path)
    # Kernels since 6.6 take O_DIRECT there, older ones refuse it when the file is opened.
    assert words in (["io_uring", "True", "0", "12"], ["io_uring", "False", "1", "12"])
    assert len(lines) == int(words[2])


def test_overlayfs(tmp_path, make_pack):
    parts = {name: tmp_path / name for name in ("lower", "upper", "work")}
    for part in parts.values():
        part.mkdir()
    options = "lowerdir={lower},upperdir={upper},workdir={work}".format(**parts)
    with mounted(tmp_path / "merged", "-t", "overlay", "-o", options, "overlay") as folder:
        path, _ = make_pack(folder / "pack")
        words, lines = read_all(path)
    assert words in (["io_uring", "True", "0", "12"], ["io_uring", "False", "1", "12"])
    assert len(lines) == int(words[2])


@pytest.mark.parametrize("block", [1024, 4096])
def test_a_file_system_on_512_byte_sectors(tmp_path, make_pack, block):
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(32 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-b", str(block), image], check=True)
    with mounted(tmp_path / "disk", "-o", "loop", image) as folder:
        path, _ = make_pack(folder / "pack")
        words, lines = read_all(path)
    assert (words, lines) == (["io_uring", "True", "0", "12"], [])


def test_without_the_package(make_pack, monkeypatch, caplog):
    path, _ = make_pack()
    monkeypatch.delitem(sys.modules, "moet_store.ring", raising=False)
    monkeypatch.setitem(sys.modules, "liburing", None)
    with PackReader([path]) as reader:
        assert reader.engine == "pread"
        assert reader.counters.fallback_count == 1
    (line,) = caplog.messages
    assert "pip install liburing" in line


def test_what_is_asked_for_by_name_is_not_replaced(monkeypatch, refused):
    monkeypatch.delitem(sys.modules, "moet_store.ring", raising=False)
    monkeypatch.setitem(sys.modules, "liburing", None)
    with refused(PackErrorKind.UNAVAILABLE):
        open_engine("io_uring", 8, Counters(1))


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.EPERM, "seccomp profile"),
        (errno.ENOSYS, "gVisor"),
        (errno.ENOMEM, "ulimit -l"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EIO, "kernel's log"),
    ],
)
def test_every_refusal_has_its_advice(monkeypatch, caplog, code, advice):
    import liburing

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(liburing, "io_uring_queue_init", refuse)
    counters = Counters(1)
    engine = open_engine("auto", 8, counters)
    engine.close()
    assert isinstance(engine, PoolEngine)
    assert counters.fallback_count == 1
    (line,) = caplog.messages
    assert os.strerror(code) in line
    assert advice in line


def test_registered_files_are_not_needed(make_pack, monkeypatch, caplog):
    import liburing

    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    path, spec = make_pack()
    monkeypatch.setattr(liburing, "io_uring_register_files", refuse)
    with PackReader([path], engine="io_uring") as reader:
        reader.submit([(1, 0)], [aligned_buffer(spec.row_bytes)])
        assert reader.wait()[0].error is None
        assert reader.counters.fallback_count == 1
    assert len(caplog.messages) == 1


def test_kernels_without_vectored_fixed_reads(make_pack, monkeypatch, caplog):
    import liburing

    path, _ = make_pack()
    monkeypatch.setattr(liburing, "io_uring_opcode_supported", lambda *_: False)
    with ExpertStore(PackReader([path], engine="io_uring"), 2) as store:
        store.wait(store.submit([(1, 0)]))
        assert store.get((1, 0)) is not None
        assert store.counters().fallback_count == 1
    assert "kernel before 6.15" in caplog.text


def test_a_busy_kernel_is_asked_again(make_pack, monkeypatch):
    import liburing

    path, spec = make_pack()
    real, refusals = liburing.io_uring_submit, iter([errno.EAGAIN, errno.EBUSY, errno.EINTR])

    def sometimes(ring):
        code = next(refusals, None)
        if code is not None:
            raise OSError(code, os.strerror(code))
        return real(ring)

    monkeypatch.setattr(liburing, "io_uring_submit", sometimes)
    with PackReader([path], engine="io_uring") as reader:
        reader.submit([(1, 0)], [aligned_buffer(spec.row_bytes)])
        assert reader.wait()[0].error is None
        assert reader.counters.snapshot().retries == 3


def test_a_kernel_that_stays_busy_is_an_error(make_pack, monkeypatch, refused):
    import liburing

    def busy(_):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    path, spec = make_pack()
    reader = PackReader([path], engine="io_uring")
    with monkeypatch.context() as patch:
        patch.setattr(liburing, "io_uring_submit", busy)
        patch.setattr("moet_store.ring.BUSY_LIMIT", 5)
        reader.submit([(1, 0)], [aligned_buffer(spec.row_bytes)])
        with refused(PackErrorKind.IO) as caught:
            reader.wait()
    assert "Resource temporarily unavailable, 6 times" in str(caught.value)
    reader.close()


def test_a_hit_makes_no_system_call(make_pack):
    path, _ = make_pack()
    with ExpertStore(PackReader([path]), 4) as store:
        store.wait(store.submit([(1, 0), (1, 1)]))
        store.get((1, 0))
        told, tell = os.pipe()
        child = os.fork()
        if not child:
            write = 1
            filter_calls(write, ALLOW, KILL)
            for _ in range(10000):
                store.get((1, 0))
                store.get((1, 1))
            os.write(tell, b"20000 hits")
            os.getppid()
            os.write(tell, b", and a call")
        os.close(tell)
        _, status = os.waitpid(child, 0)
        with open(told, "rb") as file:  # noqa: PTH123 - a descriptor has no path
            assert file.read() == b"20000 hits"
    assert os.WTERMSIG(status) == signal.SIGSYS


def test_the_store_can_be_reopened_after_it_was_moved(tmp_path, make_pack):
    path, _ = make_pack(tmp_path / "a")
    moved = (tmp_path / "a").rename(tmp_path / "b") / path.name
    with PackReader([moved]) as reader:
        assert len(reader.written_keys()) == 12


def test_writing_needs_no_io_uring(tmp_path, make_spec, rows_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "liburing", None)
    spec = make_spec()
    with PackWriter(tmp_path, spec) as writer:
        assert writer.write_layer(1, rows_of(spec, 1))
