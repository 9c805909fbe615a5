import inspect
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet_core.residency import Move, PoolError, PoolPolicy, WorkingSetError, worst_case

LAYERS, EXPERTS = 2, 8


def make(slots=4, **settings):
    return PoolPolicy(**{"layers": LAYERS, "experts": EXPERTS, "slots": slots, **settings})


def mask(*keys, shape=(LAYERS, EXPERTS)):
    found = np.zeros(shape, bool)
    for key in keys:
        found[key] = True
    return found


def bring(policy, *keys, steps=1):
    """Use keys in steps of their own, fetching what is absent."""
    for _ in range(steps):
        policy.begin_step()
        policy.publish(policy.plan(policy.want(mask(*keys))))
    policy.check_integrity()


def keys_of(moves):
    return [move.key for move in moves]


class TestValues:
    def test_the_least_used_goes_first(self):
        policy = make(slots=2)
        bring(policy, (0, 0), steps=3)
        bring(policy, (0, 1), steps=2)
        bring(policy, (0, 2))
        assert policy.hottest() == [(0, 0), (0, 2)]

    def test_an_expert_is_used_once_a_step(self):
        policy = make(half_life=1e9)
        bring(policy, (0, 0), (0, 1))
        for _ in range(5):
            policy.want(mask((0, 1)))
            policy.note(mask((0, 1)))
        bring(policy, (0, 0))
        assert policy.hottest() == [(0, 0), (0, 1)]

    @pytest.mark.parametrize(("idle", "first"), [(9, (0, 0)), (11, (0, 1))])
    def test_a_use_counts_half_after_the_half_life(self, idle, first):
        # Two uses, `idle` steps ago, against one now: even at the half-life.
        policy = make(half_life=10)
        bring(policy, (0, 0), steps=2)
        for _ in range(idle - 1):
            policy.begin_step()
        bring(policy, (0, 1))
        assert policy.hottest()[0] == first

    def test_recency_breaks_ties_then_the_key(self):
        policy = make(half_life=float("inf"))
        bring(policy, (0, 3), (0, 1))
        bring(policy, (0, 0))
        assert policy.hottest() == [(0, 0), (0, 1), (0, 3)]

    def test_values_survive_any_number_of_steps(self):
        # Weights double each step here and start anew every 256 steps; none may overflow.
        policy = make(slots=2, half_life=1)
        bring(policy, (1, 7))
        for step in range(3000):
            bring(policy, (0, step % 2), (1, 7))
            assert policy.hottest()[0] == (1, 7)
        assert np.isfinite(policy._score).all()
        bring(policy, (0, 5))
        assert policy.hottest() == [(0, 5), (1, 7)]


class TestDemand:
    def test_a_step_never_loses_a_row_it_wants(self):
        # Incident 15: the pool was recycled within one step, so that fetched rows were gone again.
        policy = make(slots=4)
        bring(policy, (0, 0), (0, 1), (0, 2), (0, 3), steps=9)
        policy.begin_step()
        for key in [(1, 0), (1, 1), (1, 2), (1, 3)]:
            policy.publish(policy.plan([key]))
        assert set(policy.hottest()) == {(1, 0), (1, 1), (1, 2), (1, 3)}
        with pytest.raises(WorkingSetError):
            policy.plan([(1, 4)])

    def test_value_gives_no_veto(self):
        # Incident 17: what a step needs is admitted however hot the rows are that must go.
        policy = make(slots=1)
        bring(policy, (0, 0), steps=500)
        policy.begin_step()
        assert policy.plan([(1, 5)]) == [Move((1, 5), 0, (0, 0))]

    def test_pins_end_with_the_step(self):
        # Incidents 11 and 12: marks and pins outlived their step until nothing could be evicted.
        policy = make(slots=4)
        for start in (0, 4, 0, 4):
            bring(policy, *[(0, start + i) for i in range(4)])
        assert policy.evictions == 12

    def test_counting_pins_nothing(self):
        # Incident 11: the marks of a prefill pinned the whole pool.
        policy = make(slots=4)
        bring(policy, (0, 0), (0, 1), (0, 2), (0, 3))
        policy.begin_step()
        policy.note(np.ones((LAYERS, EXPERTS), bool))
        assert len(policy.plan([(1, i) for i in range(4)])) == 4

    def test_too_few_slots_are_an_error_that_changes_nothing(self):
        # Incidents 14 and 16: a pool below one step's experts corrupted the output silently.
        policy = make(slots=3)
        bring(policy, (0, 0), (0, 1))
        policy.begin_step()
        missing = policy.want(mask((0, 1), (0, 2), (0, 3), (0, 4)))
        before = policy.slot_of.copy(), policy.hottest(), policy.evictions
        with pytest.raises(WorkingSetError, match=r"wanted 3 slots .* found 2 of 3: 1 hold") as e:
            policy.plan(missing)
        assert (e.value.slots, e.value.pinned, e.value.wanted) == (3, 1, 3)
        np.testing.assert_array_equal(policy.slot_of, before[0])
        assert (policy.hottest(), policy.evictions) == before[1:]
        policy.check_integrity()
        policy.begin_step()
        assert len(policy.plan([(1, 0), (1, 1), (1, 2)])) == 3

    def test_the_worst_case_is_what_a_step_can_need(self):
        assert worst_case(75, 256, 8, 1) == 600
        assert worst_case(75, 256, 8, 1000) == 75 * 256

    def test_a_row_on_its_way_is_not_ordered_twice(self):
        # Incident 37: every tick fetched the same rows again.
        policy = make(slots=2)
        policy.begin_step()
        policy.note(mask((0, 0)))
        (move,) = policy.promotions(8)
        assert policy.promotions(8) == []
        assert policy.want(mask((0, 0))) == [(0, 0)]
        assert policy.plan([(0, 0), (0, 1), (0, 1)]) == [Move((0, 1), 1, None)]
        policy.publish([move])
        assert policy.plan([(0, 0)]) == []

    def test_slots_on_their_way_are_named_when_they_are_what_is_missing(self):
        policy = make(slots=1)
        policy.publish(moves := policy.preload([(0, 0)]))
        policy.begin_step()
        policy.note(mask((0, 1)))
        policy.note(mask((0, 1)))
        moves = policy.plan([(0, 1)])
        policy.begin_step()
        with pytest.raises(WorkingSetError, match=r"1 are being filled\. Wait for") as caught:
            policy.plan([(0, 2)])
        assert caught.value.filling == 1
        policy.publish(moves)
        assert keys_of(policy.plan([(0, 2)])) == [(0, 2)]


class TestRepair:
    """Incident 8: missing experts change what later layers are routed to, until none is missing."""

    @given(st.integers(0, 2**32 - 1), st.integers(0, 6))
    def test_layers_plus_one_passes_suffice_in_the_smallest_pool(self, seed, spare):
        layers, experts, top_k = 5, 16, 3
        rng = np.random.default_rng(seed)
        shape = (layers, experts)
        slots = worst_case(layers, experts, top_k, 1) + spare
        policy = PoolPolicy(layers=layers, experts=experts, slots=slots)

        def forward(step):
            """Route each layer by the step and by all that was missing above it."""
            wanted, missing = mask(shape=shape), ()
            for layer in range(layers):
                router = np.random.default_rng([seed, step, layer, len(missing), *missing])
                for expert in router.choice(experts, top_k, replace=False).tolist():
                    wanted[layer, expert] = True
                    if policy.slot_of[layer, expert] < 0:
                        missing = (*missing, layer * experts + expert)
            return wanted, missing

        for step in range(6):
            policy.begin_step()
            for _ in range(layers + 1):
                wanted, missing = forward(step)
                if not missing:
                    break
                moves = policy.plan(policy.want(wanted))
                lost = rng.random(len(moves)) < 0.3
                policy.abandon([m for m, gone in zip(moves, lost, strict=True) if gone])
                policy.publish([m for m, gone in zip(moves, lost, strict=True) if not gone])
                policy.publish(policy.plan(m.key for m, g in zip(moves, lost, strict=True) if g))
                policy.check_integrity()
            assert not missing, f"step {step}: {missing} still missing after {layers + 1} passes"

    def test_rows_of_earlier_passes_go_last(self):
        policy = make(slots=3)
        bring(policy, (0, 0), steps=99)
        policy.begin_step()
        policy.publish(policy.plan(policy.want(mask((0, 1), (1, 1)))))
        assert [m.evicted for m in policy.plan(policy.want(mask((0, 1), (1, 2))))] == [(0, 0)]

    def test_rows_of_earlier_passes_go_before_the_step_fails(self):
        policy = make(slots=2)
        policy.begin_step()
        policy.publish(policy.plan(policy.want(mask((0, 1), (1, 1)))))
        slot = policy.slot_of[1, 1]
        missing = policy.want(mask((0, 1), (1, 2)))
        assert policy.plan(missing) == [Move((1, 2), slot, (1, 1))]
        policy.publish([Move((1, 2), slot, (1, 1))])
        assert policy.want(mask((0, 1), (1, 2))) == []


class TestPromotions:
    def test_free_slots_take_what_was_most_used(self):
        policy = make(slots=2)
        for keys in ([(0, 0), (0, 1), (0, 2)], [(0, 1), (0, 2)], [(0, 2)]):
            policy.begin_step()
            policy.note(mask(*keys))
        assert keys_of(policy.promotions(9)) == [(0, 2), (0, 1)]

    def test_never_more_than_the_limit(self):
        # Incident 15: a cap for each call, times a loop, moved the whole pool.
        policy = make(slots=8)
        policy.note(np.ones((LAYERS, EXPERTS), bool))
        assert [len(policy.promotions(limit)) for limit in (0, 3, 3, 3)] == [0, 3, 3, 2]

    @given(st.integers(0, 2**32 - 1))
    def test_skipping_the_search_changes_no_decision(self, seed):
        # A settled pool answers without looking; the other policy looks every time.
        rng = np.random.default_rng(seed)
        margin, slots = float(rng.choice([0.0, 0.5, 1.0])), int(rng.integers(1, 17))
        quick, thorough = (make(slots=slots, half_life=3, margin=margin) for _ in range(2))
        for _ in range(30):
            wanted = rng.random((LAYERS, EXPERTS)) < rng.choice([0.05, 0.2, 0.6])
            kind, limit = rng.choice(["want", "note", "prompt", "drop"]), int(rng.integers(0, 4))
            for policy in (quick, thorough):
                policy.begin_step()
                if kind == "want" and wanted.sum() <= slots:
                    policy.publish(policy.plan(policy.want(wanted)))
                else:
                    policy.note(wanted & (kind != "drop"), prompt=kind == "prompt")
            thorough._settled = False
            moves, expected = quick.promotions(limit), thorough.promotions(limit)
            assert moves == expected, f"wanted {expected}, got {moves}"
            for policy in (quick, thorough):
                (policy.abandon if kind == "drop" else policy.publish)(moves)

    def test_replacing_takes_more_than_the_margin(self):
        policy = make(slots=1, margin=2, half_life=float("inf"))
        bring(policy, (0, 0))
        for _ in range(3):
            policy.begin_step()
            policy.note(mask((0, 1)))
        assert policy.promotions(9) == []
        policy.begin_step()
        policy.note(mask((0, 1)))
        assert policy.promotions(9) == [Move((0, 1), 0, (0, 0))]

    @pytest.mark.parametrize(("margin", "moved"), [(0.375, 1), (0.625, 0)])
    def test_the_margin_counts_decayed_uses(self, margin, moved):
        # One use now against one that has come down to a half.
        policy = make(slots=1, margin=margin, half_life=1)
        for _ in range(20):
            policy.begin_step()
        bring(policy, (0, 0))
        policy.begin_step()
        policy.note(mask((0, 1)))
        assert len(policy.promotions(9)) == moved

    def test_two_experts_of_like_value_do_not_take_turns(self):
        # Incident 16: what was promoted in one step was evicted in the next.
        policy = make(slots=1)
        bring(policy, (0, 0))
        moved = 0
        for step in range(100):
            policy.begin_step()
            policy.note(mask((0, step % 2)))
            moves = policy.promotions(9)
            policy.publish(moves)
            moved += len(moves)
        assert moved == 0

    @pytest.mark.parametrize("prompt", [True, False])
    def test_a_flood_leaves_the_hot_set(self, prompt):
        # Incident 27: one prefill touched everything and wiped the pool.
        policy = make(slots=4)
        hot = [(1, i) for i in range(4)]
        bring(policy, *hot, steps=3)
        for _ in range(20):
            policy.begin_step()
            policy.note(np.ones((LAYERS, EXPERTS), bool), prompt=prompt)
            assert policy.promotions(9) == []
        assert policy.hottest() == hot

    def test_prompts_alone_replace_nothing_however_many(self):
        policy = make(slots=2)
        bring(policy, (0, 0), (0, 1))
        for _ in range(500):
            policy.begin_step()
            policy.note(mask((1, 0), (1, 1)), prompt=True)
            assert policy.promotions(9) == []

    def test_prompts_fill_free_slots_the_latest_first(self):
        policy = make(slots=2)
        for keys in ([(0, 0), (0, 1)], [(0, 1)]):
            policy.begin_step()
            policy.note(mask(*keys), prompt=True)
        assert keys_of(policy.promotions(9)) == [(0, 1), (0, 0)]

    def test_a_step_that_reads_a_prompt_and_decodes_counts_what_it_decodes(self):
        policy = make(slots=2, half_life=float("inf"))
        for _ in range(3):
            policy.begin_step()
            policy.note(mask((0, 0), (0, 1)), prompt=True)
            policy.want(mask((0, 1)))
        policy.begin_step()
        policy.want(mask((0, 0)))
        assert keys_of(policy.promotions(9)) == [(0, 1), (0, 0)]

    def test_uses_count_whether_or_not_they_were_acted_on(self):
        # Incidents 24 to 26: uses between two ticks of a thread were dropped.
        policy = make(slots=2)
        for _ in range(50):
            policy.begin_step()
            policy.note(mask((0, 5)))
        policy.begin_step()
        policy.note(mask((0, 1), (0, 2)))
        assert keys_of(policy.promotions(9)) == [(0, 5), (0, 1)]

    def test_the_current_step_loses_nothing(self):
        policy = make(slots=1)
        bring(policy, (0, 0))
        for _ in range(50):
            policy.begin_step()
            policy.note(mask((0, 1)))
        policy.want(mask((0, 0)))
        assert policy.promotions(9) == []


class TestFailures:
    def test_a_failed_read_gives_the_slot_back(self):
        # Incident 61: no rollback, a slot was lost with every failure.
        policy = make(slots=2)
        bring(policy, (0, 0), (0, 1))
        for _ in range(20):
            policy.begin_step()
            policy.abandon(policy.plan([(1, 0), (1, 1)]))
            policy.check_integrity()
        assert policy.resident == 0
        assert len(policy.plan([(1, 2), (1, 3)])) == 2

    def test_a_row_is_absent_until_its_bytes_are_there(self):
        # Incident 39: a key was found before its read had failed.
        policy = make()
        moves = policy.plan([(0, 3)])
        assert policy.slot_of[0, 3] == -1
        assert (0, 3) not in policy.hottest()
        policy.publish(moves)
        assert policy.slot_of[0, 3] == moves[0].slot

    @pytest.mark.parametrize("end", ["publish", "abandon"])
    def test_a_move_ends_once(self, end):
        policy = make()
        moves = policy.plan([(0, 3), (0, 4)])
        with pytest.raises(PoolError, match="every move once, found one of them twice"):
            getattr(policy, end)([moves[0], moves[0]])
        policy.check_integrity()
        getattr(policy, end)(moves)
        with pytest.raises(PoolError, match=r"wanted \(0, 3\) on its way .* found nothing there"):
            getattr(policy, end)(moves)
        policy.check_integrity()

    @pytest.mark.parametrize("slot", [-1, 4])
    def test_a_slot_that_is_none(self, slot):
        with pytest.raises(PoolError, match="slots below 4"):
            make().publish([Move((0, 0), slot, None)])


class TestHeat:
    def test_heat_survives_restarts(self):
        # Incidents 28 and 36: the order of the heat file decayed with every start.
        keys = [(1, 3), (0, 2), (1, 0), (0, 7)]
        for _ in range(3):
            policy = make()
            for start in (0, 2):
                policy.publish(policy.preload(keys[start : start + 2]))
            for _ in range(10):
                policy.begin_step()
            assert policy.hottest() == keys
            keys = policy.hottest()

    def test_heat_takes_free_slots_only(self):
        policy = make(slots=2)
        bring(policy, (0, 0))
        assert policy.preload([(0, 0), (1, 1), (1, 1), (1, 2)]) == [Move((1, 1), 1, None)]

    def test_what_was_never_used_again_goes_first(self):
        policy = make(slots=3)
        policy.publish(policy.preload([(0, 0), (0, 1)]))
        bring(policy, (0, 2))
        policy.begin_step()
        assert [m.evicted for m in policy.plan([(1, 0), (1, 1)])] == [(0, 1), (0, 0)]

    def test_heat_alone_promotes_nothing(self):
        policy = make(slots=1)
        policy.abandon(policy.preload([(0, 0)]))
        assert policy.promotions(9) == []


class TestInterface:
    def test_copies_decide_alike(self):
        # Incident 10: decisions followed the clock of a thread; only calls may count.
        ranks = [make(slots=6), make(slots=6)]
        rng = np.random.default_rng(3)
        for _ in range(200):
            wanted = rng.random((LAYERS, EXPERTS)) < 0.15
            decisions = []
            for policy in ranks:
                policy.begin_step()
                missing = policy.want(wanted)
                if len(missing) <= 6 and wanted.sum() <= 6:
                    policy.publish(policy.plan(missing))
                moves = policy.promotions(2)
                policy.publish(moves)
                decisions.append((missing, moves, policy.hottest()))
            assert decisions[0] == decisions[1]

    def test_more_than_256_experts(self):
        # Incident 3: a table of 256 rows served a model of 384 experts.
        policy = PoolPolicy(layers=2, experts=384, slots=1)
        policy.publish(policy.plan([(1, 383)]))
        assert np.argwhere(policy.slot_of >= 0).tolist() == [[1, 383]]

    def test_the_table_is_read_only(self):
        with pytest.raises(ValueError, match="read-only"):
            make().slot_of[0, 0] = 1

    @pytest.mark.parametrize(
        "wanted", [np.zeros((LAYERS, EXPERTS), np.int8), np.zeros((EXPERTS, LAYERS), bool)]
    )
    def test_a_mask_of_another_kind(self, wanted):
        with pytest.raises(ValueError, match=r"wanted must be bool \(2, 8\), got "):
            make().want(wanted)

    @pytest.mark.parametrize("key", [(2, 0), (0, 8), (-1, 0), (0, -1)])
    @pytest.mark.parametrize("order", ["plan", "preload"])
    def test_keys_that_are_none(self, key, order):
        with pytest.raises(ValueError, match=r"below \(2, 8\), got \(.*"):
            getattr(make(), order)([(0, 0), key])

    @pytest.mark.parametrize(
        "settings",
        [{"slots": 0}, {"layers": 0}, {"experts": 0}, {"half_life": 0.0}, {"margin": -1.0}],
    )
    def test_settings_that_make_no_sense(self, settings):
        with pytest.raises(ValueError, match="must be"):
            make(**settings)

    def test_nothing_waits_or_runs_beside(self):
        source = inspect.getsource(inspect.getmodule(PoolPolicy))
        assert "import time" not in source
        assert "import threading" not in source

    @pytest.mark.parametrize("error", [PoolError("this", "that"), WorkingSetError(4, 3, 1, 2)])
    def test_errors_cross_process_borders(self, error):
        copy = pickle.loads(pickle.dumps(error))
        assert (str(copy), vars(copy)) == (str(error), vars(error))


class TestIntegrity:
    """Each way to break a table is found and named."""

    @pytest.fixture
    def policy(self):
        policy = make(slots=4)
        bring(policy, (0, 0), (0, 1))
        policy.plan([(1, 0)])
        return policy

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda p: p._free.append(0), "slot 0 once among .* found it 2 times"),
            (lambda p: p._free.clear(), "slot 3 once among .* found it 0 times"),
            (lambda p: p._slot_of.__setitem__(1, 0), r"expert \(0, 1\) in the slot that it owns"),
            (lambda p: p._slot_of.__setitem__(9, 1), r"expert \(1, 1\) in the slot that it owns"),
            (lambda p: p._owner.__setitem__(1, 5), "in the slot that it owns"),
            (lambda p: p._coming.__setitem__(8, False), r"wanted expert \(1, 0\) on its way"),
            (lambda p: p._coming.__setitem__(9, True), r"wanted expert \(1, 1\) not on its way"),
        ],
    )
    def test_one_table(self, policy, damage, message):
        policy.check_integrity()
        damage(policy)
        with pytest.raises(PoolError, match=message):
            policy.check_integrity()

    def test_an_expert_that_owns_two_slots(self, policy):
        slot = policy._free.pop()
        policy._owner[slot] = 0
        policy._slot_of[0] = slot
        with pytest.raises(PoolError, match="an expert that owns two"):
            policy.check_integrity()

    def test_an_expert_that_comes_twice(self, policy):
        policy._filling[policy._free.pop()] = 8
        with pytest.raises(PoolError, match="an expert with two"):
            policy.check_integrity()

    def test_an_expert_that_is_present_and_comes(self, policy):
        policy._filling[policy._free.pop()] = 0
        policy._coming[0] = True
        with pytest.raises(PoolError, match=r"\(0, 0\) absent while it is on its way"):
            policy.check_integrity()
