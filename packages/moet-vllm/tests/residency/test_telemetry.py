"""Telemetry of small pools: what is published and reported is what was counted."""

import errno
import itertools
import os
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from small_model import EXPERTS, MODEL_LAYERS, TOP_K, SmallModel, tokens

from moet_core.gate import Gate, GateChange, GateSettings, changed
from moet_store import Snapshot
from moet_store.engines import PoolEngine
from moet_store.heat import heat_path, load_heat
from moet_vllm.events import MARKER, Pool
from moet_vllm.residency import telemetry as module
from moet_vllm.residency.counts import Counts
from moet_vllm.residency.metric_names import (
    COUNTERS,
    FINE_COUNTERS,
    GATE_COUNTERS,
    GATE_GAUGES,
    GAUGES,
    STORE_COUNTERS,
)
from moet_vllm.residency.telemetry import PoolState, Telemetry

ALL = len(MODEL_LAYERS) * EXPERTS
ONE_TOKEN = len(MODEL_LAYERS) * TOP_K
COUNTED = [field for field, _ in COUNTERS.values()]
RANKS = itertools.count(100)
"""Metrics live as long as the process, so each test has a rank of its own."""


@pytest.fixture(scope="module")
def model():
    return SmallModel()


@pytest.fixture(scope="module")
def idle(model):
    return model.resident(ONE_TOKEN, model.pinned())


@pytest.fixture
def pack(model, tmp_path):
    return model.write_pack(tmp_path)


@pytest.fixture
def rank():
    return next(RANKS)


@pytest.fixture
def clock(monkeypatch):
    """Return what tells telemetry the time: its attribute `now`, in seconds."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def lines(monkeypatch):
    """Return the lines that were logged."""
    lines = []
    monkeypatch.setattr(module.logger, "info", lambda text, *values: lines.append(text % values))
    return lines


def published(metrics, rank):
    """Return the value of each metric of a rank, by the field behind it."""
    suffix = "" if metrics is GAUGES else "_total"
    return {
        field: REGISTRY.get_sample_value(name + suffix, {"rank": str(rank)})
        for name, (field, _) in metrics.items()
    }


def check_published(resident, rank):
    counts = {field: getattr(resident.counts, field) for field in COUNTED}
    got = published(COUNTERS, rank)
    # The sum of differences of floats; everything else is whole.
    assert got.pop("stall_seconds") == pytest.approx(counts.pop("stall_seconds"), rel=1e-12)
    assert got == counts
    stored = resident.store.counters()
    fields = [field for field, _ in STORE_COUNTERS.values()]
    wanted = {field: 0 if stored is None else getattr(stored, field) for field in fields}
    assert published(STORE_COUNTERS, rank) == wanted
    assert published(GAUGES, rank) == {
        "slots": resident.shape.slots,
        "resident": resident.policy.resident,
        "coverage": resident.shape.slots / ALL,
        "row_bytes": resident.counts.row_bytes,
    }


def test_every_count_has_a_metric_of_its_own():
    assert {*COUNTED} == {*Counts.__struct_fields__} - {"row_bytes"}
    assert {field for field, _ in STORE_COUNTERS.values()} < {*Snapshot.__struct_fields__}
    assert {field for field, _ in GAUGES.values()} == {*PoolState.__struct_fields__}
    assert len(COUNTERS | STORE_COUNTERS | GAUGES) == 11 + 5 + 4


class TestPublish:
    @pytest.mark.parametrize("kind", ["pinned", "pack", "arena"])
    def test_metrics_are_the_counts_after_every_step(self, model, pack, rank, kind):
        store = model.pinned() if kind == "pinned" else model.packed(pack, 6 * (kind == "arena"))
        resident = model.resident(ONE_TOKEN + 1, store)
        telemetry = Telemetry(resident, rank, 0)
        for seed in range(12):
            model.step(resident, tokens([1, 1, 3][seed % 3], seed))
            telemetry.step_ended()
            check_published(resident, rank)
        counts = resident.counts
        assert min(counts.repaired, counts.streamed, counts.missed, counts.brought) > 0
        resident.close()

    def test_refused_reads_and_failed_steps_show(self, model, pack, rank):
        def refuse(fd, buffers, offset):
            raise OSError(errno.EIO, "injected")

        resident = model.resident(ONE_TOKEN, model.packed(pack, 0, PoolEngine(2, refuse)))
        telemetry = Telemetry(resident, rank, 0)
        model.step(resident, tokens(1, 0))
        telemetry.step_ended()
        check_published(resident, rank)
        assert published(COUNTERS, rank)["failed"] == 1
        assert published(STORE_COUNTERS, rank)["io_errors"] > 0
        resident.close()

    def test_damaged_rows_show(self, model, pack, rank):
        def damage(fd, buffers, offset):
            count = os.preadv(fd, buffers, offset)
            buffers[0][0] ^= 1
            return count

        resident = model.resident(ONE_TOKEN, model.packed(pack, 0, PoolEngine(2, damage)))
        telemetry = Telemetry(resident, rank, 0)
        model.step(resident, tokens(1, 0))
        telemetry.step_ended()
        check_published(resident, rank)
        assert published(STORE_COUNTERS, rank)["checksum_errors"] > 0
        resident.close()

    def test_steps_that_lack_experts_show(self, model, rank):
        resident = model.resident(ONE_TOKEN, model.pinned(), tolerance=ONE_TOKEN)
        telemetry = Telemetry(resident, rank, 0)
        model.step(resident, tokens(1, 0))
        telemetry.step_ended()
        check_published(resident, rank)
        assert published(COUNTERS, rank)["degraded"] == 1

    @settings(max_examples=20, deadline=None)
    @given(st.lists(st.dictionaries(st.sampled_from(COUNTED), st.integers(0, 2**40)), max_size=4))
    def test_counters_follow_any_rise(self, idle, rises):
        rank, resident = next(RANKS), idle
        resident.counts = Counts(row_bytes=4096)
        telemetry = Telemetry(resident, rank, 0)
        for rise in rises:
            for field, more in rise.items():
                setattr(resident.counts, field, getattr(resident.counts, field) + more)
            telemetry.publish()
            wanted = {field: getattr(resident.counts, field) for field in COUNTED}
            assert published(COUNTERS, rank) == wanted

    def test_two_engines_of_different_ranks_do_not_mix(self, model):
        ranks = next(RANKS), next(RANKS)
        residents = [model.resident(slots, model.pinned()) for slots in (ONE_TOKEN, ALL)]
        both = [Telemetry(*pair, 0) for pair in zip(residents, ranks, strict=True)]
        for seed, number in enumerate([0, 1, 0, 0, 1, 0]):
            model.step(residents[number], tokens(1, seed))
            both[number].step_ended()
        for resident, rank in zip(residents, ranks, strict=True):
            check_published(resident, rank)
        assert [resident.counts.steps for resident in residents] == [4, 2]

    def test_two_engines_of_one_rank_add_up(self, model, rank):
        residents = [model.resident(slots, model.pinned()) for slots in (ONE_TOKEN, ALL)]
        both = [Telemetry(resident, rank, 0) for resident in residents]
        for seed, number in enumerate([0, 1, 0, 0, 0, 1]):
            model.step(residents[number], tokens(1, seed))
            both[number].step_ended()
        got = published(COUNTERS, rank)
        for field in ("steps", "passes", "wanted", "missed", "brought"):
            assert got[field] == sum(getattr(r.counts, field) for r in residents), field
        assert published(GAUGES, rank)["slots"] == ALL, "gauges show what was published last"

    def test_a_pool_that_is_opened_anew_counts_on(self, model, rank):
        for run in (1, 2):
            resident = model.resident(ONE_TOKEN, model.pinned())
            telemetry = Telemetry(resident, rank, 0)
            for seed in range(3):
                model.step(resident, tokens(1, seed))
                telemetry.step_ended()
            assert published(COUNTERS, rank)["steps"] == 3 * run


class TestStarted:
    @pytest.mark.parametrize(
        ("slots", "repairable"),
        [
            (ONE_TOKEN - 1, 0),
            (ONE_TOKEN, 1),
            (2 * ONE_TOKEN - 1, 1),
            (3 * ONE_TOKEN, 3),
            (ALL, module.MOST_TOKENS),
        ],
    )
    def test_reports_the_pool(self, model, rank, capsys, slots, repairable):
        resident = model.resident(slots, model.pinned())
        Telemetry(resident, rank, 0).started()
        (line,) = capsys.readouterr().err.splitlines()
        pool = msgspec.json.decode(line.removeprefix(MARKER), type=Pool)
        assert (pool.rank, pool.slots, pool.experts) == (rank, slots, ALL)
        assert pool.coverage == pytest.approx(slots / ALL, abs=1e-4)
        assert pool.ring == resident.shape.ring
        assert pool.pool_bytes == len(resident.pool.rows) * resident.counts.row_bytes
        assert pool.working_set_of_one_token == ONE_TOKEN
        assert pool.repairable_tokens == repairable
        check_published(resident, rank)


class TestReport:
    def test_the_line_has_the_figures_since_the_last_one(self, model, rank, clock, lines):
        resident = model.resident(ONE_TOKEN, model.pinned())
        telemetry = Telemetry(resident, rank, 10)
        first = Counts(
            row_bytes=2**19,
            steps=40,
            repaired=5,
            streamed=3,
            failed=2,
            degraded=1,
            passes=50,
            wanted=1000,
            missed=100,
            brought=150,
            promoted=10,
            stall_seconds=0.4,
        )
        second = Counts(
            row_bytes=2**19,
            steps=48,
            repaired=6,
            streamed=5,
            failed=5,
            degraded=5,
            passes=60,
            wanted=1400,
            missed=150,
            brought=180,
            promoted=20,
            stall_seconds=0.6,
        )
        for counts in (first, second):
            resident.counts = counts
            clock.now += 10
            telemetry.step_ended()
        assert lines == [
            "moet: 40 steps, 12.5 % repaired, 3 streamed, 1.25 passes a step, hit rate 90.0 %, "
            "2.5 missed a step, 2.0 MiB moved a step, 10.0 ms stalled a step, 2 failed, "
            "1 degraded, pool 0 of 8",
            "moet: 8 steps, 12.5 % repaired, 2 streamed, 1.25 passes a step, hit rate 87.5 %, "
            "6.2 missed a step, 2.5 MiB moved a step, 25.0 ms stalled a step, 3 failed, "
            "4 degraded, pool 0 of 8",
        ]

    def test_a_line_each_interval_and_none_without_steps(self, model, rank, clock, lines):
        resident = model.resident(ONE_TOKEN, model.pinned())
        telemetry = Telemetry(resident, rank, 10)
        for seconds in range(1, 26):
            clock.now = 1000.0 + seconds
            model.step(resident, tokens(1, seconds))
            telemetry.step_ended()
        assert [line.split(",")[0] for line in lines] == ["moet: 10 steps", "moet: 10 steps"]
        telemetry.report()
        telemetry.report()
        assert [line.split(",")[0] for line in lines[2:]] == ["moet: 5 steps"]

    def test_steps_that_want_nothing_have_missed_nothing(self, model, rank, lines):
        resident = model.resident(ONE_TOKEN, model.pinned())
        resident.counts.steps = 1
        Telemetry(resident, rank, 10).report()
        assert "hit rate 100.0 %" in lines[0]

    def test_none_if_the_interval_is_zero(self, model, pack, rank, clock, lines):
        resident = model.resident(ONE_TOKEN, model.packed(pack, 0))
        telemetry = Telemetry(resident, rank, 0)
        for seed in range(3):
            clock.now += 1e6
            model.step(resident, tokens(1, seed))
            telemetry.step_ended()
        assert lines == []
        assert not heat_path(pack).exists()
        resident.close()

    def test_the_heat_is_kept_with_each_line(self, model, pack, rank, clock, lines):
        resident = model.resident(ONE_TOKEN + 2, model.packed(pack, 0))
        telemetry = Telemetry(resident, rank, 10)
        kept = []
        for seed in range(1, 21):
            clock.now = 1000.0 + seed
            model.step(resident, tokens(1, seed))
            telemetry.step_ended()
            if seed < 10:
                assert not heat_path(pack).exists()
            elif seed % 10 == 0:
                kept.append(load_heat(resident.store.reader.packs[0], EXPERTS))
                assert kept[-1] == resident.hottest()
                assert len(lines) == len(kept)
        assert len(kept) == 2
        assert kept[0] != kept[1], "the steps change nothing: choose others"
        resident.close()


def test_a_gate_and_its_tier_are_published_and_reported(model, rank, lines, clock):
    gate = Gate(GateSettings(tau=1.0, passes=0))
    fine = model.fine_tier(ALL, model.pinned(fine=True), gate=gate)
    resident = model.resident(ALL, model.pinned(), fine=fine)
    telemetry = Telemetry(resident, rank, report_seconds=5)
    for seed in range(4):
        model.step(resident, tokens(1, seed))
        telemetry.step_ended()
        for name, (field, _) in GATE_COUNTERS.items():
            found = REGISTRY.get_sample_value(f"{name}_total", {"rank": str(rank)})
            assert found == pytest.approx(getattr(gate.counts, field)), name
        for name, (field, _) in FINE_COUNTERS.items():
            found = REGISTRY.get_sample_value(f"{name}_total", {"rank": str(rank)})
            assert found == getattr(fine.tier, field), name
    assert gate.counts.fires == 4
    gate.settings = changed(gate.settings, GateChange(tau=0.25, gate_budget=3))
    telemetry.publish()
    settings = {name: REGISTRY.get_sample_value(name, {"rank": str(rank)}) for name in GATE_GAUGES}
    assert settings == {"moet_gate_tau": 0.25, "moet_gate_budget": 3}
    assert resident.counts.brought < fine.tier.brought + resident.counts.brought
    clock.now += 5
    telemetry.step_ended()
    assert any("4 of 4 steps fired (100.0 %)" in line for line in lines)


def test_without_a_gate_none_is_published(model, idle, rank):
    Telemetry(idle, rank, report_seconds=0).publish()
    counters = [f"{name}_total" for name in GATE_COUNTERS]
    for name in [*counters, *GATE_GAUGES]:
        assert REGISTRY.get_sample_value(name, {"rank": str(rank)}) is None, name
