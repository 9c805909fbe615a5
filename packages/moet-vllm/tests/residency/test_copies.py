"""Memory that copies still read is not reused, with copies that end when a test says so."""

import pytest
import torch
from small_model import EXPERTS, MODEL_LAYERS, SmallModel

from moet_store import PackReader
from moet_vllm.residency.copies import Copies
from moet_vllm.residency.padding import Padding
from moet_vllm.residency.stores import PackStore, PinnedStore

KEYS = [(layer, expert) for layer in MODEL_LAYERS for expert in range(EXPERTS)]


class LateCopies:
    """Copies that are noted, and read their rows when they end.

    Attributes:
        waits: How often somebody waited.
    """

    def __init__(self):
        self.rows, self.bytes, self.waits = [], {}, 0

    def place(self, key, row):
        self.rows.append((key, row))
        return len(self.rows)

    def end(self, count):
        for key, row in self.rows[len(self.bytes) : len(self.bytes) + count]:
            self.bytes[key] = bytes(row)

    def done(self):
        return len(self.bytes)

    def wait(self):
        self.waits += 1
        self.end(len(self.rows))


@pytest.fixture(scope="module")
def model():
    return SmallModel()


@pytest.fixture(scope="module")
def pack(model, tmp_path_factory):
    return model.write_pack(tmp_path_factory.mktemp("pack"))


def row_of(model, key):
    return model.rows[MODEL_LAYERS.index(key[0]), key[1]].numpy().tobytes()


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("arena", [0, 5])
def test_rows_stay_until_their_copies_end(model, pack, arena, scan):
    store, copies = model.packed(pack, arena), LateCopies()
    store.attach(copies)
    for start in range(0, len(KEYS), 3):
        store.begin_step()
        store.bring(KEYS[start : start + 3], copies.place, scan=scan)
        store.read_ahead(KEYS[start + 3 : start + 5])
        copies.end(1)
        store.check_integrity()
    assert copies.waits > 0, "the store never ran out of memory: nothing was tried"
    copies.wait()
    assert copies.bytes == {key: row_of(model, key) for key in KEYS}
    store.close()


def test_ended_copies_free_their_buffers_without_a_wait(model, pack):
    store, copies = model.packed(pack, 0), LateCopies()
    store.attach(copies)
    for start in range(0, len(KEYS), 2):
        store.bring(KEYS[start : start + 2], copies.place, scan=True)
        copies.end(2)
    assert copies.waits == 0
    assert copies.bytes == {key: row_of(model, key) for key in KEYS}
    store.close()


@pytest.mark.parametrize("kind", ["pinned", "pack", "arena"])
def test_memory_is_unlocked_when_a_store_closes(model, pack, kind):
    locked = []

    def pin(region):
        locked.append(region)
        return lambda: locked.remove(region)

    if kind == "pinned":
        store = PinnedStore(MODEL_LAYERS, EXPERTS, model.rows.shape[2], pin)
    else:
        arena = 3 * (kind == "arena")
        store = PackStore(PackReader([pack]), staging=4, arena_rows=arena, pin=pin)
    assert sum(map(len, locked)) == store.host_bytes
    store.close()
    store.close()
    assert locked == []


def test_on_a_cpu_copies_are_done_when_they_were_started():
    copies, target = Copies(torch.device("cpu")), torch.zeros(2, 4, dtype=torch.uint8)
    assert copies.start(target[0], memoryview(bytearray(b"abcd"))) == 1
    assert copies.start(target[1], memoryview(bytearray(b"efgh"))) == 2
    assert target.numpy().tobytes() == b"abcdefgh"
    assert copies.mark().has_passed
    assert copies.done() == 2


class TestPadding:
    ids = torch.arange(8, dtype=torch.int32).reshape(4, 2)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_rows_behind_the_tokens_want_nobody(self, dtype):
        padding = Padding(16, torch.device("cpu"))
        for count in (3, 1, 4, 2):
            padding.begin(count)
            got = padding.without(self.ids.to(dtype))
            assert got.dtype == dtype
            assert got[:count].equal(self.ids[:count].to(dtype))
            assert (got[count:] == -1).all()

    def test_a_pass_that_is_not_padded_stays_as_it_is(self):
        padding = Padding(3, torch.device("cpu"))
        assert padding.without(self.ids[:3]).equal(self.ids[:3]), "before the first step"
        padding.begin(2)
        assert padding.without(self.ids) is self.ids
        one = self.ids[:1]
        assert padding.without(one) is one

    def test_its_memory_stays_where_it_is(self):
        padding = Padding(4, torch.device("cpu"))
        before = padding._no_expert.data_ptr()
        padding.begin(2)
        assert padding._no_expert.data_ptr() == before


def test_marks_that_have_passed_are_not_kept():
    copies = Copies(torch.device("cpu"))
    for _ in range(100):
        copies.start(torch.empty(4, dtype=torch.uint8), memoryview(bytearray(4)))
        copies.mark()
    assert len(copies._marks) == 1
    assert copies.done() == 100
