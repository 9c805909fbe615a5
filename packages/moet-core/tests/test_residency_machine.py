"""PoolPolicy against a model of dicts that computes every decision the slow, obvious way."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moet_core.residency import Move, PoolError, PoolPolicy, WorkingSetError

LAYERS, EXPERTS = 3, 4
KEYS = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
KEY_LISTS = st.lists(st.sampled_from(KEYS), max_size=8)


def mask_of(keys):
    mask = np.zeros((LAYERS, EXPERTS), bool)
    for key in keys:
        mask[key] = True
    return mask


class Pool(RuleBasedStateMachine):
    # Half-lives of 1 and infinity make every value an exact fraction, with many ties for the
    # second; what lies between them differs in no line of code.
    @initialize(
        slots=st.integers(1, 14),
        half_life=st.sampled_from([1.0, math.inf]),
        margin=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def start(self, slots, half_life, margin):
        self.policy = PoolPolicy(
            layers=LAYERS, experts=EXPERTS, slots=slots, half_life=half_life, margin=margin
        )
        self.slots, self.margin, self.decays = slots, margin, half_life == 1
        self.present, self.filling, self.moves = {}, {}, []
        self.uses = {key: set() for key in KEYS}
        self.seen, self.preloaded = {}, {}
        self.step, self.evictions = 1, 0
        self.step_wanted, self.pass_wanted = set(), set()

    def value(self, key):
        ages = [self.step - step for step in self.uses[key]]
        return sum(
            (Fraction(1, 2**age) if self.decays else Fraction(1) for age in ages), Fraction()
        )

    def rank(self, key):
        """Sort the most valuable first."""
        recency = self.seen.get(key, self.preloaded.get(key, -math.inf))
        return -self.value(key), -recency, key

    def absent(self, keys):
        return [k for k in dict.fromkeys(keys) if k not in self.present and k not in self.filling]

    def free(self):
        return self.slots - len(self.present) - len(self.filling)

    def use(self, keys):
        for key in keys:
            self.uses[key].add(self.step)
            self.seen[key] = self.step

    def started(self, moves, keys, victims):
        """Compare moves with what had to move, and follow them."""
        assert [move.key for move in moves] == keys
        assert [m.evicted for m in moves] == [None] * (len(keys) - len(victims)) + victims
        for move in moves:
            if move.evicted is None:
                assert move.slot not in {*self.present.values(), *self.filling.values()}
            else:
                assert move.slot == self.present.pop(move.evicted)
                self.evictions += 1
            self.filling[move.key] = move.slot
        self.moves += moves

    @rule()
    def begin_step(self):
        self.policy.begin_step()
        self.step += 1
        self.step_wanted, self.pass_wanted = set(), set()

    @rule(keys=KEY_LISTS)
    def want(self, keys):
        missing = self.policy.want(mask_of(keys))
        self.use(keys)
        self.pass_wanted = set(keys)
        self.step_wanted |= set(keys)
        assert missing == sorted(set(keys) - set(self.present))

    @rule(keys=KEY_LISTS, prompt=st.booleans())
    def note(self, keys, prompt):
        self.policy.note(mask_of(keys), prompt=prompt)
        if prompt:
            self.seen |= dict.fromkeys(keys, self.step)
        else:
            self.use(keys)

    @rule(keys=KEY_LISTS)
    def plan(self, keys):
        absent = self.absent(keys)
        pinned = self.pass_wanted | set(keys)
        evictable = sorted(
            set(self.present) - pinned,
            key=lambda key: (
                key in self.step_wanted,
                *(-x for x in self.rank(key)[:2]),
                *_down(key),
            ),
        )
        short = max(len(absent) - self.free(), 0)
        if short > len(evictable):
            with pytest.raises(WorkingSetError) as caught:
                self.policy.plan(keys)
            found = caught.value
            assert (found.slots, found.pinned, found.filling, found.wanted) == (
                self.slots,
                len(set(self.present) & pinned),
                len(self.filling),
                len(absent),
            )
        else:
            self.started(self.policy.plan(keys), absent, evictable[:short])
            self.pass_wanted = pinned
            self.step_wanted |= pinned

    @rule(limit=st.integers(0, 5))
    def promotions(self, limit):
        best = sorted(self.absent(key for key in KEYS if key in self.seen), key=self.rank)[:limit]
        free = self.free()
        worst = sorted(set(self.present) - self.step_wanted, key=self.rank, reverse=True)
        pairs = []
        for key, victim in zip(best[free:], worst, strict=False):
            if self.value(key) <= self.value(victim) + Fraction(self.margin):
                break
            pairs.append((key, victim))
        keys = best[:free] + [key for key, _ in pairs]
        self.started(self.policy.promotions(limit), keys, [victim for _, victim in pairs])

    @rule(keys=KEY_LISTS)
    def preload(self, keys):
        absent = self.absent(keys)[: self.free()]
        self.started(self.policy.preload(keys), absent, [])
        for key in absent:
            if key not in self.seen and key not in self.preloaded:
                self.preloaded[key] = -1 - len(self.preloaded)

    @precondition(lambda self: self.moves)
    @rule(data=st.data(), arrived=st.booleans())
    def end_moves(self, data, arrived):
        ended = data.draw(st.lists(st.sampled_from(self.moves), min_size=1, unique=True))
        (self.policy.publish if arrived else self.policy.abandon)(ended)
        for move in ended:
            self.moves.remove(move)
            slot = self.filling.pop(move.key)
            if arrived:
                self.present[move.key] = slot

    @rule(key=st.sampled_from(KEYS), slot=st.integers(0, 13), arrived=st.booleans())
    def end_unknown_move(self, key, slot, arrived):
        if self.filling.get(key) == slot:
            return
        moves = [*self.moves, Move(key, slot, None)]
        with pytest.raises(PoolError):
            (self.policy.publish if arrived else self.policy.abandon)(moves)

    @invariant()
    def the_tables_agree(self):
        self.policy.check_integrity()
        wanted = np.full((LAYERS, EXPERTS), -1, np.int32)
        for key, slot in self.present.items():
            wanted[key] = slot
        np.testing.assert_array_equal(self.policy.slot_of, wanted)
        found = (self.policy.resident, self.policy.evictions, self.policy.step)
        assert found == (len(self.present), self.evictions, self.step)
        assert self.policy.hottest() == sorted(self.present, key=self.rank)


def _down(key):
    return -key[0], -key[1]


TestPool = Pool.TestCase
TestPool.settings = settings(stateful_step_count=40)
