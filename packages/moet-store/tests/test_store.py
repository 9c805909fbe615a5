import json
import os
import time

import pytest

from moet_store import ExpertStore, PackErrorKind, PackReader
from moet_store.heat import heat_path, load_heat, save_heat
from moet_store.pack import open_pack


@pytest.fixture
def open_store(make_pack):
    """Open a store of a new pack; keyword arguments go to the pack."""
    stores = []

    def open_(slots=4, **fields):
        path, _ = make_pack(**fields)
        stores.append(ExpertStore(PackReader([path]), slots))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


def fetch(store, *keys):
    store.wait(store.submit(list(keys)))


def test_a_miss_is_fetched_and_then_found(open_store, row_of):
    store = open_store()
    spec = store.reader.spec
    assert store.get((2, 3)) is None
    fetch(store, (2, 3))
    assert store.get((2, 3))[: spec.payload_bytes].tobytes() == row_of(spec, 2, 3).tobytes()
    counted = store.counters()
    assert (counted.misses, counted.hits, counted.bytes_read) == (1, 1, spec.row_bytes)


def test_rows_in_memory_get_no_ticket(open_store):
    store = open_store()
    fetch(store, (1, 0))
    assert store.submit([(1, 0)]) == []


def test_a_row_on_its_way_keeps_its_ticket(open_store):
    store = open_store()
    first = store.submit([(1, 0), (1, 0)], prefetch=True)
    assert store.submit([(1, 0)]) == first
    assert len(first) == 1
    store.wait()


def test_a_row_is_coming_until_it_is_published(open_store):
    store = open_store()
    assert not store.is_coming((1, 0))
    (ticket,) = store.submit([(1, 0)])
    assert store.is_coming((1, 0))
    assert store.tickets([(1, 1), (1, 0)]) == [ticket]
    store.wait()
    assert not store.is_coming((1, 0))
    assert store.tickets([(1, 0)]) == []


def test_polling_publishes(open_store):
    store = open_store()
    store.submit([(1, 0)])
    deadline = time.monotonic() + 10
    while (1, 0) not in store.arena and time.monotonic() < deadline:
        store.poll()
    assert store.get((1, 0)) is not None


def test_a_damaged_row_is_never_found(make_pack, row_of):
    path, spec = make_pack()
    with path.open("r+b") as file:
        file.seek(spec.offset(1, 1))
        file.write(b"damage")
    with ExpertStore(PackReader([path]), 1) as store:
        (completion,) = store.wait(store.submit([(1, 1)]))
        assert completion.error.kind is PackErrorKind.ROW_DAMAGED
        assert store.get((1, 1)) is None
        fetch(store, (1, 2))
        assert store.get((1, 2)) is not None
        store.check_integrity()


def test_eviction_is_counted(open_store):
    store = open_store(slots=2)
    fetch(store, (1, 0), (1, 1))
    store.begin_step()
    fetch(store, (1, 2))
    assert store.counters().evictions == 1
    assert len(store.arena) == 2


def test_a_step_that_needs_more_than_the_arena_is_refused(open_store, refused):
    store = open_store(slots=2)
    with refused(PackErrorKind.ARENA_FULL) as caught:
        store.submit([(1, 0), (1, 1), (1, 2)])
    assert (caught.value.layer, caught.value.expert) == (1, 2)
    store.wait()
    store.check_integrity()
    assert set(store.arena) == {(1, 0), (1, 1)}


def test_prefetches_never_evict(open_store):
    store = open_store(slots=2)
    fetch(store, (1, 0), (1, 1))
    store.begin_step()
    assert store.submit([(1, 2)], prefetch=True) == []
    assert set(store.arena) == {(1, 0), (1, 1)}


def test_a_row_that_does_not_exist_takes_no_slot(open_store, refused):
    store = open_store(slots=1)
    with refused(PackErrorKind.ROW_MISSING):
        store.submit([(9, 9)])
    fetch(store, (1, 0))
    assert store.get((1, 0)) is not None


def test_a_foreign_write_into_the_arena_is_found(open_store, refused):
    store = open_store(slots=1)
    fetch(store, (5, 2))
    store.check_integrity()
    store.arena.region[100] ^= 1
    with refused(PackErrorKind.ARENA_BROKEN) as caught:
        store.check_integrity()
    assert (caught.value.layer, caught.value.expert) == (5, 2)


def test_a_hit_takes_less_than_5_microseconds(open_store):
    store = open_store()
    fetch(store, (1, 0), (1, 1), (1, 2), (1, 3))
    keys = [(1, expert) for expert in range(4)] * 250
    best = float("inf")
    for _ in range(20):
        store.begin_step()
        begin = time.perf_counter()
        for key in keys:
            store.get(key)
        best = min(best, (time.perf_counter() - begin) / len(keys))
    assert best < 5e-6


def test_heat_is_preloaded_in_file_order(make_pack):
    path, _ = make_pack()
    with ExpertStore(PackReader([path]), 4) as store:
        fetch(store, (5, 1), (1, 3), (2, 0))
        store.begin_step()
        store.get((2, 0))
        store.save_heat()
    assert load_heat(open_pack(path), 4) == [(2, 0), (1, 3), (5, 1)]
    with ExpertStore(PackReader([path]), 2) as store:
        completions = store.wait(store.preload())
        assert sorted(completion.key for completion in completions) == [(1, 3), (2, 0)]
        assert set(store.arena) == {(1, 3), (2, 0)}


def test_stripes_are_preloaded_side_by_side(make_pack):
    path, _ = make_pack(experts=1)
    with PackReader([path]) as reader:
        reader._stripes._files.append([])
        keys = [(1, 2), (1, 1), (2, 0), (1, 0)]
        assert reader.file_order(keys) == [(1, 0), (1, 1), (1, 2), (2, 0)]


def test_no_heat_is_no_error(make_pack):
    path, _ = make_pack()
    with ExpertStore(PackReader([path]), 2) as store:
        assert store.preload() == []


def test_heat_of_another_pack_is_refused(tmp_path, make_pack, refused):
    path, _ = make_pack(tmp_path / "a")
    other, _ = make_pack(tmp_path / "b", size=2)
    save_heat(open_pack(other), [(1, 0)])
    heat_path(other).replace(heat_path(path))
    with refused(PackErrorKind.HEAT) as caught:
        load_heat(open_pack(path), 4)
    assert f"{open_pack(other).digest:016x}" in caught.value.found


BAD_HEAT = {
    "empty": b"",
    "not UTF-8": b"\xff\xfe",
    "a list": b"[]",
    "version": b'{"version":2,"pack":"%s","keys":[]}',
    "a layer": b'{"version":1,"pack":"%s","keys":[[3,0]]}',
    "an expert": b'{"version":1,"pack":"%s","keys":[[1,4]]}',
    "a negative expert": b'{"version":1,"pack":"%s","keys":[[1,-1]]}',
    "a field": b'{"version":1,"pack":"%s","keys":[],"x":1}',
}


@pytest.mark.parametrize("text", BAD_HEAT.values(), ids=BAD_HEAT)
def test_damaged_heat_is_refused(make_pack, refused, text):
    path, _ = make_pack()
    pack = open_pack(path)
    heat_path(path).write_bytes(text.replace(b"%s", f"{pack.digest:016x}".encode()))
    with refused(PackErrorKind.HEAT) as caught:
        load_heat(pack, 4)
    assert caught.value.path == heat_path(path)


def test_heat_is_saved_in_one_step(make_pack, monkeypatch, refused):
    path, _ = make_pack()
    pack = open_pack(path)
    save_heat(pack, [(1, 0)])

    def fail(*_):
        raise OSError(5, "no")

    monkeypatch.setattr(os, "fsync", fail)
    with refused(PackErrorKind.IO):
        save_heat(pack, [(1, 1)])
    assert load_heat(pack, 4) == [(1, 0)]


def test_heat_names_every_key_once(make_pack):
    path, _ = make_pack()
    pack = open_pack(path)
    heat_path(path).write_text(
        json.dumps({"version": 1, "pack": f"{pack.digest:016x}", "keys": [[1, 0], [1, 0]]})
    )
    assert load_heat(pack, 4) == [(1, 0)]
