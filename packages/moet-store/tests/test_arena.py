import gc
import sys

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moet_store import Arena, PackErrorKind

ROW = 4096


def fill(arena, *keys, evict=True):
    """Put rows into an arena; returns the keys that found no slot."""
    left_out = []
    for key in keys:
        slot = arena.claim(key, evict=evict)
        if slot is None:
            left_out.append(key)
            continue
        arena.destination(slot)[:] = bytes([key[1]]) * ROW
        arena.publish(slot)
    return left_out


def test_memory_is_page_aligned_and_pinned_once():
    pinned = []
    arena = Arena(3, ROW, pinned.append)
    (region,) = pinned
    assert len(region) == 3 * ROW
    assert np.frombuffer(region, dtype=np.uint8).ctypes.data % 4096 == 0
    fill(arena, (0, 1))
    assert bytes(region).count(b"\1") == ROW


def test_a_failing_pin_is_not_hidden():
    def pin(region):
        raise MemoryError("cannot pin")

    with pytest.raises(MemoryError, match="cannot pin"):
        Arena(3, ROW, pin)


def test_a_row_is_found_only_when_it_is_published():
    arena = Arena(1, ROW)
    slot = arena.claim((0, 7), evict=False)
    assert arena.get((0, 7)) is None
    arena.publish(slot)
    assert arena.get((0, 7)) is not None


def test_an_abandoned_row_is_never_found():
    arena = Arena(1, ROW)
    arena.abandon(arena.claim((0, 7), evict=False))
    assert arena.get((0, 7)) is None
    assert fill(arena, (0, 8), evict=False) == []


def test_views_share_the_memory_and_are_read_only():
    arena = Arena(2, ROW)
    fill(arena, (0, 1), (0, 2))
    view = arena.get((0, 2))
    assert np.shares_memory(view, np.frombuffer(arena.region, dtype=np.uint8))
    assert view.tobytes() == b"\2" * ROW
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_a_hit_allocates_nothing():
    arena = Arena(1, ROW)
    fill(arena, (0, 1))
    key = (0, 1)
    assert arena.get(key) is arena.get(key)
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(1000):
        arena.get(key)
    assert sys.getallocatedblocks() - before < 50


def test_the_least_recently_used_of_equals_goes():
    arena = Arena(3, ROW)
    for expert in range(3):
        arena.begin_step()
        fill(arena, (0, expert))
    arena.begin_step()
    fill(arena, (0, 9))
    assert set(arena) == {(0, 1), (0, 2), (0, 9)}


def test_frequent_use_outweighs_recent_use():
    arena = Arena(2, ROW)
    fill(arena, (0, 1))
    for _ in range(5):
        arena.begin_step()
        arena.get((0, 1))
    arena.begin_step()
    fill(arena, (0, 2))
    arena.begin_step()
    fill(arena, (0, 3))
    assert set(arena) == {(0, 1), (0, 3)}


def test_old_uses_fade():
    arena = Arena(2, ROW)
    fill(arena, (0, 1))
    for _ in range(5):
        arena.begin_step()
        arena.get((0, 1))
    for _ in range(2000):
        arena.begin_step()
    fill(arena, (0, 2))
    arena.begin_step()
    fill(arena, (0, 3))
    assert set(arena) == {(0, 2), (0, 3)}


def test_rows_of_this_step_are_never_evicted():
    arena = Arena(2, ROW)
    fill(arena, (0, 1), (0, 2))
    assert fill(arena, (0, 3)) == [(0, 3)]
    arena.begin_step()
    arena.get((0, 1))
    fill(arena, (0, 3))
    assert set(arena) == {(0, 1), (0, 3)}


def test_scans_never_evict():
    arena = Arena(2, ROW)
    fill(arena, (0, 1))
    arena.begin_step()
    assert fill(arena, (0, 2), (0, 3), evict=False) == [(0, 3)]
    assert set(arena) == {(0, 1), (0, 2)}


def test_room_is_what_can_be_claimed():
    arena = Arena(4, ROW)
    fill(arena, (0, 1), (0, 2), (0, 3))
    arena.begin_step()
    assert arena.room == 4
    arena.get((0, 2))
    slot = arena.claim((0, 4), evict=True)
    assert arena.room == 2
    arena.publish(slot)
    assert arena.room == 2
    assert fill(arena, (0, 5), (0, 6), (0, 7)) == [(0, 7)]
    assert arena.room == 0


def test_memory_of_a_slot_is_that_of_its_row():
    arena = Arena(2, ROW)
    fill(arena, (0, 7))
    slot = arena.slot_of((0, 7))
    assert bytes(arena.memory(slot)) == bytes(arena.get((0, 7))) == b"\7" * ROW


def test_the_hottest_come_first():
    arena = Arena(3, ROW)
    fill(arena, (0, 0), (0, 1), (0, 2))
    for keys in ([1, 2], [1], [0]):
        arena.begin_step()
        for expert in keys:
            arena.get((0, expert))
    assert arena.hottest() == [(0, 1), (0, 0), (0, 2)]


def test_an_arena_without_slots_is_refused(refused):
    with refused(PackErrorKind.ARENA_BROKEN):
        Arena(0, ROW)


def test_a_slot_that_was_not_claimed_has_no_destination(refused):
    with refused(PackErrorKind.ARENA_BROKEN):
        Arena(1, ROW).destination(0)


def test_a_row_cannot_be_claimed_twice(refused):
    arena = Arena(2, ROW)
    fill(arena, (0, 1))
    with refused(PackErrorKind.ARENA_BROKEN):
        arena.claim((0, 1), evict=True)


CORRUPTIONS = {
    "two owners": lambda arena: arena._slot_of.update({(0, 9): 0}),
    "lost slot": lambda arena: arena._free.pop(),
    "slot twice": lambda arena: arena._free.append(0),
    "wrong owner": lambda arena: arena._key_of.__setitem__(0, (5, 5)),
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_tables_that_disagree_are_found(corrupt, refused):
    arena = Arena(3, ROW)
    fill(arena, (0, 1))
    arena.check_tables()
    corrupt(arena)
    with refused(PackErrorKind.ARENA_BROKEN):
        arena.check_tables()


class Machine(RuleBasedStateMachine):
    """An arena against a dictionary."""

    keys = st.tuples(st.just(0), st.integers(0, 7))

    def __init__(self):
        super().__init__()
        self.arena = Arena(3, ROW)
        self.filling = {}
        self.used = set()

    @rule()
    def step(self):
        self.arena.begin_step()
        self.used.clear()

    @rule(key=keys, evict=st.booleans())
    def claim(self, key, evict):
        if key in self.arena or key in self.filling:
            return
        before = set(self.arena)
        slot = self.arena.claim(key, evict=evict)
        gone = before - set(self.arena)
        assert not gone & self.used
        if slot is None:
            free = 3 - len(before) - len(self.filling)
            assert free == 0
            assert not evict or before == self.used
        else:
            assert evict or not gone
            assert len(gone) <= 1
            self.filling[key] = slot
            self.arena.destination(slot)[:] = bytes([key[1]]) * ROW

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def publish(self, data):
        key = data.draw(st.sampled_from(sorted(self.filling)))
        self.arena.publish(self.filling.pop(key))
        self.used.add(key)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def abandon(self, data):
        self.arena.abandon(self.filling.pop(data.draw(st.sampled_from(sorted(self.filling)))))

    @rule(key=keys)
    def get(self, key):
        view = self.arena.get(key)
        if view is not None:
            self.used.add(key)
            assert view.tobytes() == bytes([key[1]]) * ROW

    @invariant()
    def tables_agree(self):
        self.arena.check_tables()
        assert set(self.arena.hottest()) == set(self.arena)


Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestArenaAgainstADictionary = Machine.TestCase
