import errno
import fcntl
import os
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet_store import (
    PackErrorKind,
    PackReader,
    PackWriter,
    StripedWriter,
    aligned_buffer,
    bytes_identity,
    find_packs,
    tune_depth,
)
from moet_store.counters import Counters
from moet_store.engines import PoolEngine, open_engine
from moet_store.rows import Row

MIB = 2**20


class ByHand:
    """An engine whose reads end when the test says so."""

    name = "by hand"
    entries = 64

    def __init__(self):
        self.started = []
        self.ended = []

    def add_file(self, fd): ...

    def register(self, region, row_bytes): ...

    def start(self, tag, fd, buffer, offset):
        self.started.append((tag, fd, buffer, offset))

    def submit(self): ...

    def finish(self, result=None):
        """End the oldest read, with what the file holds or with another result."""
        tag, fd, buffer, offset = self.started.pop(0)
        count = os.preadv(fd, [buffer], offset)
        self.ended.append((tag, count if result is None else result))

    def reap(self):
        ended, self.ended = self.ended, []
        return ended

    def wait(self, seconds):
        if not self.ended and self.started:
            self.finish()

    def close(self): ...


class Tampered:
    """An engine in front of a real one that changes what the kernel says."""

    def __init__(self, engine, change):
        self._engine = engine
        self._change = change
        self.name, self.entries = engine.name, engine.entries

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def reap(self):
        return [(tag, self._change(result)) for tag, result in self._engine.reap()]


def read_one(reader, key, **options):
    buffer = aligned_buffer(reader.spec.row_bytes)
    (ticket,) = reader.submit([key], [buffer], **options)
    (completion,) = reader.wait([ticket])
    return buffer, completion


@pytest.fixture
def big(make_pack):
    """Write a pack of rows of 5 MiB and a bit: alone two requests, hashed in three stretches."""
    return make_pack(layers=(4,), experts=2, payload_bytes=5 * MIB + 5)


def options(engine):
    # A direct read cannot return part of a sector, and the faults below are finer than that.
    return {"engine": engine, "direct": False}


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("engine", ["io_uring", "pread"])
def test_rows_of_two_requests(big, row_of, engine, direct):
    path, spec = big
    with PackReader([path], engine=engine, direct=direct) as reader:
        buffer, completion = read_one(reader, (4, 1))
        assert (completion.error, reader.engine, reader.direct) == (None, engine, direct)
    assert bytes(buffer[: spec.payload_bytes]) == row_of(spec, 4, 1).tobytes()


@pytest.mark.parametrize(
    ("row_bytes", "verify", "lengths"),
    [
        (4096, True, [4096]),
        (MIB, True, [MIB]),
        (MIB + 4096, True, [MIB + 4096 - 64 * 4096, 64 * 4096]),
        (7 * MIB, True, [21 * MIB // 4, 7 * MIB // 4]),
        # Nothing could be computed while the rest is on its way.
        (7 * MIB, False, [7 * MIB]),
    ],
)
def test_long_rows_alone_are_two_requests_one_after_the_other(
    make_pack, row_bytes, verify, lengths
):
    path, spec = make_pack(layers=(4,), experts=2, payload_bytes=row_bytes)
    engine, found, at = ByHand(), [], spec.offset(4, 1)
    with PackReader([path], engine=engine, verify=verify) as reader:
        reader.submit([(4, 1)], [aligned_buffer(spec.row_bytes)])
        while engine.started:
            ((_, _, buffer, offset),) = engine.started
            assert offset == at + sum(found)
            found.append(len(buffer))
            engine.finish()
            ended = reader.poll()
    assert found == lengths
    assert [completion.error for completion in ended] == [None]


def test_the_first_request_is_hashed_while_the_second_is_with_the_kernel(big, hashed):
    path, spec = big
    look, started = hashed
    engine = ByHand()
    look.append(lambda row: (row.hashed, [offset for _, _, _, offset in engine.started]))
    with PackReader([path], engine=engine) as reader:
        reader.submit([(4, 0)], [aligned_buffer(spec.row_bytes)])
        engine.finish()
        assert reader.poll() == []
        rest = spec.offset(4, 0) + spec.row_bytes - 320 * 4096
        assert started == [(0, [rest]), (2 * MIB, [rest])]
        engine.finish()
        assert [completion.error for completion in reader.poll()] == [None]


def test_the_rest_of_a_row_goes_before_rows_that_have_not_begun(big):
    path, spec = big
    engine = ByHand()
    with PackReader([path], engine=engine, depth=1) as reader:
        buffers = [aligned_buffer(spec.row_bytes) for _ in range(2)]
        (early,) = reader.submit([(4, 0)], buffers[:1])
        reader.submit([(4, 1)], buffers[1:])
        assert [completion.ticket for completion in reader.wait_any()] == [early]
        assert len(engine.started) == 1


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_rows_beside_others_are_one_request(big, together, depth):
    path, spec = big
    engine, lengths = ByHand(), {}
    with PackReader([path], engine=engine, depth=depth) as reader:
        buffers = [aligned_buffer(spec.row_bytes) for _ in range(2)]
        if together:
            reader.submit([(4, 0), (4, 1)], buffers)
        else:
            reader.submit([(4, 0)], buffers[:1])
            reader.submit([(4, 1)], buffers[1:])
        while engine.started:
            _, _, buffer, offset = engine.started[0]
            lengths[offset] = len(buffer)
            engine.finish()
            reader.poll()
    first, second = (spec.offset(4, expert) for expert in range(2))
    rest = 320 * 4096
    if together:
        assert lengths == {first: spec.row_bytes, second: spec.row_bytes}
    else:
        # The first was alone when it began.
        split = {first: spec.row_bytes - rest, first + spec.row_bytes - rest: rest}
        assert lengths == {**split, second: spec.row_bytes}


def test_a_demand_goes_before_the_rest_of_a_prefetch(big):
    path, spec = big
    engine = ByHand()
    with PackReader([path], engine=engine, depth=1) as reader:
        buffers = [aligned_buffer(spec.row_bytes) for _ in range(2)]
        reader.submit([(4, 0)], buffers[:1], prefetch=True)
        (demand,) = reader.submit([(4, 1)], buffers[1:])
        assert [completion.ticket for completion in reader.wait_any()] == [demand]


@pytest.mark.parametrize(
    ("row_bytes", "depth"), [(4096, 16), (2 * MIB, 16), (5 * MIB, 6), (16 * MIB, 4)]
)
def test_the_depth_without_a_probe_depends_on_the_row(make_pack, row_bytes, depth):
    path, _ = make_pack(layers=(4,), experts=1, payload_bytes=row_bytes)
    with PackReader([path], engine=ByHand()) as reader:
        assert reader.depth == depth


def test_registered_memory(big, row_of):
    path, spec = big
    with PackReader([path], engine="io_uring") as reader:
        region = aligned_buffer(2 * spec.row_bytes)
        reader.register(region)
        halves = [region[: spec.row_bytes], region[spec.row_bytes :]]
        reader.submit([(4, 0), (4, 1)], halves)
        assert [completion.error for completion in reader.wait()] == [None, None]
    for expert, half in enumerate(halves):
        assert bytes(half[: spec.payload_bytes]) == row_of(spec, 4, expert).tobytes()


def test_submit_and_poll_do_not_wait(big):
    path, spec = big
    engine = ByHand()
    with PackReader([path], engine=engine) as reader:
        (ticket,) = reader.submit([(4, 0)], [aligned_buffer(spec.row_bytes)])
        assert reader.poll() == []
        assert reader.wait([ticket], seconds=0) == []
        engine.finish()
        assert reader.poll() == []
        engine.finish()
        (completion,) = reader.poll()
        assert (completion.ticket, completion.key, completion.error) == (ticket, (4, 0), None)
        assert reader.poll() == reader.wait([ticket]) == []


def test_waiting_for_any_returns_with_the_first(make_pack):
    path, spec = make_pack()
    engine = ByHand()
    with PackReader([path], engine=engine) as reader:
        buffers = [aligned_buffer(spec.row_bytes) for _ in range(2)]
        tickets = reader.submit([(1, 0), (1, 1)], buffers)
        engine.started.reverse()
        assert [completion.ticket for completion in reader.wait_any()] == tickets[1:]
        assert [completion.ticket for completion in reader.wait_any()] == tickets[:1]
        assert reader.wait_any() == []


def test_demand_overtakes_prefetch(make_pack):
    path, spec = make_pack()
    engine = ByHand()
    with PackReader([path], engine=engine, depth=1) as reader:
        buffers = [aligned_buffer(spec.row_bytes) for _ in range(4)]
        early = reader.submit([(1, 0), (1, 1), (1, 2)], buffers[:3], prefetch=True)
        late = reader.submit([(5, 3)], buffers[3:])
        reader.promote(early[2])
        order = [completion.ticket for _ in range(4) for completion in reader.wait(seconds=1)]
    assert order == [early[0], late[0], early[2], early[1]]


def test_no_more_than_the_depth_is_with_the_kernel(big):
    path, spec = big
    engine = ByHand()
    with PackReader([path], engine=engine, depth=2) as reader:
        reader.submit([(4, 0), (4, 1)], [aligned_buffer(spec.row_bytes) for _ in range(2)])
        while engine.started:
            counted = reader.counters.snapshot()
            assert counted.in_flight == len(engine.started) <= counted.queue_depth == 2
            engine.finish()
            reader.poll()
        assert reader.counters.snapshot().queued == 0


@given(seed=st.integers(0, 2**32))
def test_short_reads_and_interruptions_are_repeated(tmp_path_factory, make_spec, row_of, seed):
    spec = make_spec(layers=(4,), experts=2)
    folder = tmp_path_factory.mktemp("pack")
    with PackWriter(folder, spec) as writer:
        writer.write_layer(4, [row_of(spec, 4, expert) for expert in spec.held])
    chance = random.Random(seed)

    def preadv(fd, buffers, offset):
        if chance.random() < 0.3:
            code = chance.choice([errno.EINTR, errno.EAGAIN])
            raise OSError(code, os.strerror(code))
        (buffer,) = buffers
        return os.preadv(fd, [buffer[: chance.randint(1, len(buffer))]], offset)

    with PackReader([writer.path], **options(PoolEngine(2, preadv))) as reader:
        buffer, completion = read_one(reader, (4, 1))
    assert completion.error is None
    assert bytes(buffer[: spec.payload_bytes]) == row_of(spec, 4, 1).tobytes()


def test_one_byte_at_a_time(make_pack, row_of):
    path, spec = make_pack()
    engine = PoolEngine(1, lambda fd, buffers, at: os.preadv(fd, [buffers[0][:1]], at))
    with PackReader([path], **options(engine)) as reader:
        buffer, completion = read_one(reader, (2, 2))
        assert reader.counters.snapshot().retries == spec.row_bytes - 1
    assert completion.error is None
    assert bytes(buffer[: spec.payload_bytes]) == row_of(spec, 2, 2).tobytes()


def test_short_direct_reads_through_io_uring(big, row_of):
    path, spec = big
    chance = random.Random(1)
    engine = Tampered(
        open_engine("io_uring", 64, Counters(1)),
        lambda result: chance.randrange(4096, result + 1, 512),
    )
    with PackReader([path], engine=engine) as reader:
        assert reader.direct
        buffer, completion = read_one(reader, (4, 1))
        assert reader.counters.retries > 0
    assert completion.error is None
    assert bytes(buffer[: spec.payload_bytes]) == row_of(spec, 4, 1).tobytes()


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (-errno.EAGAIN, PackErrorKind.IO),
        (-errno.EINTR, PackErrorKind.IO),
        (100, PackErrorKind.ROW_SHORT),
    ],
)
def test_retries_are_bounded(make_pack, result, kind):
    path, _ = make_pack()
    engine = Tampered(PoolEngine(1), lambda _: result)
    with PackReader([path], engine=engine) as reader:
        _, completion = read_one(reader, (1, 1))
        counted = reader.counters.snapshot()
    assert completion.error.kind is kind
    assert (completion.error.layer, completion.error.expert) == (1, 1)
    assert (counted.io_errors, counted.retries, counted.rows_read) == (1, 33, 0)


def test_an_io_error_names_the_row(big):
    path, _ = big
    with PackReader([path], engine=Tampered(PoolEngine(), lambda _: -errno.EIO)) as reader:
        _, completion = read_one(reader, (4, 1))
        assert reader.counters.snapshot().io_errors == 1
    error = completion.error
    assert (error.kind, error.path, error.layer, error.expert) == (PackErrorKind.IO, path, 4, 1)
    assert "Input/output error" in str(error)


@pytest.mark.parametrize("request_of_two", [1, 2])
def test_a_failed_request_ends_the_row(big, request_of_two):
    path, spec = big
    engine = ByHand()
    with PackReader([path], engine=engine) as reader:
        reader.submit([(4, 0)], [aligned_buffer(spec.row_bytes)])
        if request_of_two == 2:
            engine.finish()
            assert reader.poll() == []
        engine.finish(-errno.EIO)
        assert [c.error.kind for c in reader.poll()] == [PackErrorKind.IO]
        assert engine.started == []


def test_a_mirror_is_read_from_the_start_when_the_second_request_failed(
    tmp_path, make_pack, row_of
):
    written = {"layers": (4,), "experts": 2, "payload_bytes": 5 * MIB + 5}
    paths = [make_pack(tmp_path / name, **written)[0] for name in ("a", "b")]
    engine = ByHand()
    with PackReader(paths, engine=engine) as reader:
        spec = reader.spec
        buffer = aligned_buffer(spec.row_bytes)
        reader.submit([(4, 0)], [buffer])
        failing = engine.started[0][1]
        engine.finish()
        reader.poll()
        engine.finish(-errno.EIO)
        reader.poll()
        ((_, fd, _, offset),) = engine.started
        assert (fd != failing, offset) == (True, spec.offset(4, 0))
        assert [completion.error for completion in reader.wait()] == [None]
    assert bytes(buffer[: spec.payload_bytes]) == row_of(spec, 4, 0).tobytes()


def test_a_file_that_ends_early(make_pack):
    path, spec = make_pack()
    with PackReader([path]) as reader:
        os.truncate(path, spec.offset(5, 2) + 4096)
        assert read_one(reader, (5, 1))[1].error is None
        _, completion = read_one(reader, (5, 2))
    error = completion.error
    assert (error.kind, error.layer, error.expert) == (PackErrorKind.ROW_SHORT, 5, 2)
    assert "4096 bytes into the row" in error.found


def test_direct_reads_refused_at_read_time_fall_back(big, row_of, caplog):
    path, spec = big
    refused_fds = set()

    def preadv(fd, buffers, offset):
        if os.O_DIRECT & fcntl.fcntl(fd, fcntl.F_GETFL):
            refused_fds.add(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os.preadv(fd, buffers, offset)

    with PackReader([path], engine=PoolEngine(3, preadv)) as reader:
        assert reader.direct
        for expert in (0, 1):
            buffer, completion = read_one(reader, (4, expert))
            assert completion.error is None
            assert bytes(buffer[: spec.payload_bytes]) == row_of(spec, 4, expert).tobytes()
        assert not reader.direct
        assert (reader.counters.fallback_count, reader.counters.io_errors) == (1, 0)
    assert len(refused_fds) == 1
    (line,) = caplog.messages
    assert "read through the page cache" in line
    assert "\n" not in line


@pytest.mark.parametrize("where", ["open", "preadv"])
def test_direct_reads_refused_at_open_fall_back(make_pack, monkeypatch, caplog, where):
    path, _ = make_pack()
    real_open, real_preadv = os.open, os.preadv
    direct = set()

    def fake_open(name, flags, *args):
        if flags & os.O_DIRECT and where == "open":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fd = real_open(name, flags, *args)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    def fake_preadv(fd, buffers, offset):
        if fd in direct:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real_preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "open", fake_open)
    monkeypatch.setattr(os, "preadv", fake_preadv)
    with PackReader([path]) as reader:
        assert not reader.direct
        assert reader.counters.fallback_count == 1
        assert read_one(reader, (2, 3))[1].error is None
    assert len(caplog.messages) == 1


def test_einval_through_the_page_cache_is_an_error(make_pack):
    path, _ = make_pack()
    engine = Tampered(PoolEngine(1), lambda _: -errno.EINVAL)
    with PackReader([path], **options(engine)) as reader:
        _, completion = read_one(reader, (1, 1))
    assert completion.error.kind is PackErrorKind.IO


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 16]))


def test_a_damaged_row_is_not_served(make_pack):
    path, spec = make_pack()
    flip(path, spec.offset(2, 3) + 77)
    with PackReader([path]) as reader:
        assert read_one(reader, (2, 2))[1].error is None
        _, completion = read_one(reader, (2, 3))
        assert reader.counters.snapshot().checksum_errors == 1
    error = completion.error
    assert error.kind is PackErrorKind.ROW_DAMAGED
    assert (error.path, error.layer, error.expert) == (path, 2, 3)


@pytest.mark.parametrize("place", [0, 3 * MIB, 5 * MIB + 4])
def test_damage_anywhere_shows_with_the_last_request(big, place):
    path, spec = big
    flip(path, spec.offset(4, 1) + place)
    engine = ByHand()
    with PackReader([path], engine=engine) as reader:
        reader.submit([(4, 1)], [aligned_buffer(spec.row_bytes)])
        engine.finish()
        assert reader.poll() == []
        engine.finish()
        assert [c.error.kind for c in reader.poll()] == [PackErrorKind.ROW_DAMAGED]
        assert reader.counters.snapshot().checksum_errors == 1


@pytest.fixture
def hashed(monkeypatch):
    """Record what is done whenever a stretch is hashed; returns what to do and the record."""
    real = Row.hash_stretch
    record, look = [], []

    def watched(row, most, verify):
        record.extend(see(row) for see in look)
        real(row, most, verify)

    monkeypatch.setattr(Row, "hash_stretch", watched)
    return look, record


def test_the_kernel_is_kept_busy_before_every_stretch_is_hashed(big, hashed):
    path, spec = big
    look, depths = hashed
    engine = ByHand()
    with PackReader([path], engine=engine, depth=2) as reader:
        keys = [(4, 0), (4, 1), (4, 0), (4, 1)]
        reader.submit(keys, [aligned_buffer(spec.row_bytes) for _ in keys])
        # While a stretch is hashed another read ends, as reads do.
        look.append(lambda _: (len(engine.started), bool(engine.started) and engine.finish())[0])
        engine.finish()
        engine.finish()
        assert [completion.error for completion in reader.wait()] == [None] * 4
    assert depths == [2, 1] + [0] * 10


def test_rows_that_somebody_waits_for_are_hashed_first(big, hashed):
    path, spec = big
    look, order = hashed
    engine = ByHand()

    def finish_all(row):
        while engine.started:
            engine.finish()
        return row.key

    look.append(finish_all)
    with PackReader([path], engine=engine) as reader:
        buffers = [aligned_buffer(spec.row_bytes) for _ in range(2)]
        reader.submit([(4, 0)], buffers[:1], prefetch=True)
        (demand,) = reader.submit([(4, 1)], buffers[1:])
        engine.finish()
        engine.finish()
        assert [completion.ticket for completion in reader.wait([demand])] == [demand]
        assert order == [(4, 1)] * 3
        assert [completion.key for completion in reader.poll()] == [(4, 0)]
    assert order == [(4, 1)] * 3 + [(4, 0)] * 3


def test_an_exception_while_hashing_reaches_the_caller(big, hashed):
    path, spec = big
    look, _ = hashed
    with PackReader([path], engine="io_uring") as reader:
        reader.submit([(4, 0)], [aligned_buffer(spec.row_bytes)])
        look.append(lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            reader.wait()


def test_closing_drops_rows_that_are_hashed_in_part(big, hashed):
    path, spec = big
    look, keys = hashed
    look.append(lambda row: row.key)
    engine = ByHand()
    reader = PackReader([path], engine=engine)
    reader.submit([(4, 0)], [aligned_buffer(spec.row_bytes)])
    engine.finish()
    assert reader.poll() == []
    assert keys == [(4, 0)] * 2
    engine.finish()
    reader.close()
    assert engine.started == []
    assert reader.poll() == reader.wait() == []
    assert keys == [(4, 0)] * 2


def test_a_row_at_another_rows_place_is_not_served(make_pack):
    path, spec = make_pack()
    with path.open("r+b") as file:
        file.seek(spec.offset(2, 0))
        row = file.read(spec.row_bytes)
        file.seek(spec.offset(2, 1))
        file.write(row)
    with PackReader([path]) as reader:
        assert read_one(reader, (2, 1))[1].error.kind is PackErrorKind.ROW_DAMAGED


def test_verification_is_off_only_on_request(make_pack):
    path, spec = make_pack()
    flip(path, spec.offset(2, 3) + 77)
    with PackReader([path], verify=False) as reader:
        assert read_one(reader, (2, 3))[1].error is None


@pytest.mark.parametrize("damage", ["row", "file"])
def test_a_mirror_serves_what_the_other_cannot(tmp_path, make_pack, row_of, damage):
    first, spec = make_pack(tmp_path / "a")
    second, _ = make_pack(tmp_path / "b")
    with PackReader([first, second]) as reader:
        if damage == "row":
            flip(first, spec.offset(5, 3))
        else:
            os.truncate(first, 4096)
        for key in reader.written_keys():
            buffer, completion = read_one(reader, key)
            assert completion.error is None
            assert bytes(buffer[: spec.payload_bytes]) == row_of(spec, *key).tobytes()
        counted = reader.counters.snapshot()
        assert counted.checksum_errors + counted.io_errors > 0
        assert counted.rows_read == 12


def test_a_mirror_that_is_not_finished_serves_what_it_has(tmp_path, make_pack, row_of):
    paths = [make_pack(tmp_path / name, written=part)[0] for name, part in (("a", [1]), ("b", [5]))]
    with PackReader(paths) as reader:
        for key in ((1, 0), (5, 3)):
            buffer, completion = read_one(reader, key)
            assert completion.error is None
            assert bytes(buffer[:5000]) == row_of(reader.spec, *key).tobytes()


def test_rows_bad_on_every_mirror_are_errors(tmp_path, make_pack):
    paths = []
    for name in ("a", "b"):
        path, spec = make_pack(tmp_path / name)
        flip(path, spec.offset(5, 3))
        paths.append(path)
    with PackReader(paths) as reader:
        assert read_one(reader, (5, 3))[1].error.kind is PackErrorKind.ROW_DAMAGED
        assert reader.counters.snapshot().checksum_errors == 2


def test_mirrors_share_the_work(tmp_path, make_pack):
    paths = [make_pack(tmp_path / name)[0] for name in ("a", "b")]
    engine = ByHand()
    with PackReader(paths, engine=engine) as reader:
        buffers = [aligned_buffer(reader.spec.row_bytes) for _ in range(4)]
        reader.submit([(1, expert) for expert in range(4)], buffers)
        fds = [fd for _, fd, _, _ in engine.started]
        reader.wait()
    assert sorted(fds.count(fd) for fd in set(fds)) == [2, 2]


@pytest.fixture
def stripes(tmp_path, make_spec, rows_of):
    spec = make_spec()
    folders = [tmp_path / "x", tmp_path / "y"]
    for folder in folders:
        folder.mkdir()
    with StripedWriter(folders, spec) as writer:
        for layer in spec.layers:
            writer.write_layer(layer, rows_of(spec, layer))
    return [find_packs(folder)[0] for folder in folders]


def test_a_missing_stripe_is_named(stripes, refused):
    with refused(PackErrorKind.STRIPES) as caught:
        PackReader(stripes[1:])
    assert "found only [1]" in str(caught.value)


def test_a_missing_stripe_can_be_accepted(stripes, refused):
    with PackReader(stripes[1:], partial=True) as reader:
        assert {expert for _, expert in reader.written_keys()} == {1, 3}
        assert read_one(reader, (1, 3))[1].error is None
        with refused(PackErrorKind.ROW_MISSING):
            read_one(reader, (1, 2))


def test_no_packs_are_refused(refused):
    with refused(PackErrorKind.STRIPES):
        PackReader([])


def test_packs_that_do_not_belong_together_are_refused(tmp_path, make_pack, refused):
    first, _ = make_pack(tmp_path / "a")
    second, _ = make_pack(tmp_path / "b", checkpoint=bytes_identity(b"other"))
    with refused(PackErrorKind.OTHER_PACK) as caught:
        PackReader([first, second])
    assert (caught.value.field, caught.value.path) == ("checkpoint", second)


OTHERS = {
    "checkpoint": bytes_identity(b"another"),
    "codec": "w2",
    "layout": "rows-v2",
    "tier": "fine",
    "rank": 1,
    "hidden": 128,
    "payload_bytes": 4999,
}


@pytest.mark.parametrize("field", OTHERS)
def test_another_pack_than_wanted_is_refused(make_pack, make_spec, refused, field):
    path, found = make_pack(size=2)
    wanted = make_spec(**{"size": 2, field: OTHERS[field]})
    with refused(PackErrorKind.OTHER_PACK) as caught:
        PackReader([path], wanted=wanted)
    assert caught.value.field == field
    for value in (OTHERS[field], getattr(found, field)):
        assert repr(value) in str(caught.value)


def test_any_stripes_of_the_wanted_pack_are_accepted(stripes, make_spec):
    with PackReader(stripes, wanted=make_spec()) as reader:
        assert len(reader.written_keys()) == 12


@pytest.mark.parametrize("key", [(3, 0), (1, 4), (1, -1), (2, 0)])
def test_rows_that_are_not_there_are_refused(make_pack, refused, key):
    path, _ = make_pack(written=(1, 5))
    with PackReader([path]) as reader:
        with refused(PackErrorKind.ROW_MISSING) as caught:
            read_one(reader, key)
        assert (caught.value.layer, caught.value.expert) == key


BUFFERS = {
    "short": lambda n: aligned_buffer(n - 1),
    "empty": lambda n: aligned_buffer(n)[:0],
    "unaligned": lambda n: aligned_buffer(n + 4096)[512 : n + 512],
    "read-only": lambda n: aligned_buffer(n).toreadonly(),
}


@pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS)
def test_wrong_buffers_are_refused_before_anything_is_started(make_pack, refused, make):
    path, spec = make_pack()
    engine = ByHand()
    with PackReader([path], engine=engine) as reader:
        buffers = [aligned_buffer(spec.row_bytes), make(spec.row_bytes)]
        with refused(PackErrorKind.BUFFER):
            reader.submit([(1, 0), (1, 1)], buffers)
        assert engine.started == []


def test_numpy_arrays_are_destinations(make_pack, row_of):
    path, spec = make_pack()
    array = np.frombuffer(aligned_buffer(spec.row_bytes), dtype=np.uint8)
    with PackReader([path]) as reader:
        reader.submit([(1, 2)], [array])
        reader.wait()
    np.testing.assert_array_equal(array[: spec.payload_bytes], row_of(spec, 1, 2))


def test_closing_waits_for_the_kernel(big):
    path, spec = big
    engine = ByHand()
    reader = PackReader([path], engine=engine, depth=2)
    reader.submit([(4, 0)], [aligned_buffer(spec.row_bytes)])
    reader.close()
    assert engine.started == []


def test_a_pack_replaced_while_it_is_opened_is_refused(make_pack, monkeypatch, refused):
    path, _ = make_pack()
    monkeypatch.setattr("moet_store.direct.header_digest", lambda page: 1)
    with refused(PackErrorKind.OTHER_PACK):
        PackReader([path])


def test_tuning_sets_a_depth_and_leaves_no_count(big):
    path, _ = big
    with PackReader([path], engine="io_uring") as reader:
        depth = tune_depth(reader, seconds=0.01, rounds=1)
        assert reader.depth == depth
        assert depth in (1, 2, 4, 8)
        assert reader.counters.snapshot().rows_read == 0


def test_tuning_keeps_to_what_the_engine_can_do(big):
    path, _ = big
    with PackReader([path], engine=PoolEngine(3)) as reader:
        assert tune_depth(reader, seconds=0.01, rounds=1) in (1, 2, 3)


def test_tuning_reports_damage(big, refused):
    path, spec = big
    for expert in (0, 1):
        flip(path, spec.offset(4, expert))
    with PackReader([path]) as reader, refused(PackErrorKind.ROW_DAMAGED):
        tune_depth(reader, seconds=0.01, rounds=1)


def test_latencies_and_bytes_are_counted(make_pack):
    path, spec = make_pack()
    with PackReader([path]) as reader:
        assert reader.counters.snapshot().read_p50_ms is None
        for key in reader.written_keys():
            read_one(reader, key)
        counted = reader.counters.snapshot()
    assert counted.bytes_read == 12 * spec.row_bytes
    assert 0 < counted.read_p50_ms <= counted.read_p99_ms < 10_000
