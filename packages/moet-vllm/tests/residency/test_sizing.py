"""How much of a device's memory becomes slots, and how much is left for the KV cache."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_model import EXPERTS, LAYOUT, MODEL_LAYERS, TOP_K, SmallModel, tokens

from moet_core.errors import ConfigError
from moet_vllm.pool_memory import (
    KV_SLACK,
    add_to_weights,
    kv_cache_bytes,
    profiling_first,
    room_for_pool,
)
from moet_vllm.residency.sizing import GIB, auto_pool, least_pool, ring_rows

ALL = len(MODEL_LAYERS) * EXPERTS
ROW = LAYOUT.row_bytes
LEAST = least_pool(MODEL_LAYERS, EXPERTS, TOP_K, LAYOUT)


class TestRing:
    @given(st.integers(1, 100_000), st.integers(1, 1024))
    def test_is_two_halves_of_at_most_a_quarter_layer(self, slots: int, experts: int) -> None:
        ring = ring_rows(slots, experts)
        assert ring % 2 == 0
        assert 2 <= ring <= max(2, min(experts / 2, slots / 8))

    @pytest.mark.parametrize(
        ("slots", "experts", "wanted"), [(9600, 256, 128), (256, 64, 32), (128, 64, 16), (8, 8, 2)]
    )
    def test_is_as_large_as_it_may_be(self, slots: int, experts: int, wanted: int) -> None:
        assert ring_rows(slots, experts) == wanted


class TestAuto:
    def test_begins_with_one_layer_and_the_ring_of_a_large_pool(self) -> None:
        assert (LEAST.slots, LEAST.ring) == (EXPERTS, EXPERTS // 2)
        one_layer = least_pool((3,), EXPERTS, TOP_K, LAYOUT)
        assert one_layer.slots == EXPERTS - 1, "a pool of all experts is never streamed over"

    @given(st.integers(EXPERTS * ROW, 3 * ALL * ROW))
    def test_takes_all_that_is_left(self, room: int) -> None:
        shape = auto_pool(LEAST, room)
        held = (shape.slots + shape.ring) * ROW
        assert held <= room
        assert held > room - ROW or (shape.slots, shape.ring) == (ALL, 0)
        assert (shape.layers, shape.experts, shape.top_k) == (MODEL_LAYERS, EXPERTS, TOP_K)

    @pytest.mark.parametrize("room", [EXPERTS * ROW - 1, 0, -5 * GIB])
    def test_less_than_a_layer_is_refused_with_what_to_lower(self, room: int) -> None:
        with pytest.raises(ConfigError, match=r"one layer of 8 .*--kv-cache-memory-bytes"):
            auto_pool(LEAST, room)

    @pytest.mark.parametrize("spare", [0, 5 * ROW + 17])
    @pytest.mark.parametrize("others", [None, 3 * ROW])
    def test_the_kv_cache_keeps_what_it_needs(self, spare: int, others: int | None) -> None:
        """What vLLM would give the cache beside the least pool is divided anew."""
        model = SmallModel()
        resident = model.resident(LEAST.slots, model.pinned(), ring=LEAST.ring)
        kv_cache, least = 10 * ROW, resident.pool.rows.nbytes
        available = kv_cache + spare

        def agree(value: int) -> int:
            assert others is not None
            return max(value, -(least + spare - others))

        left = room_for_pool(resident, available, kv_cache, None if others is None else agree)
        assert left == available + least - resident.pool.rows.nbytes
        assert kv_cache <= left < kv_cache + ROW + (others or 0)
        assert resident.pool.rows.nbytes == resident.shape.row.row_bytes * (
            resident.shape.slots + resident.shape.ring
        )
        for seed in range(4):
            x = tokens([1, 12][seed % 2], seed)
            assert torch.equal(model.step(resident, x), model.alone(x))
            resident.check_integrity()

    def test_a_device_that_holds_everything_streams_nothing(self) -> None:
        model = SmallModel()
        resident = model.resident(LEAST.slots, model.pinned(), ring=LEAST.ring)
        left = room_for_pool(resident, 100 * ALL * ROW, ROW, None)
        assert (resident.shape.slots, resident.shape.ring) == (ALL, 0)
        assert left == 100 * ALL * ROW + (LEAST.slots + LEAST.ring - ALL) * ROW
        resident.preload([(layer, expert) for layer in MODEL_LAYERS for expert in range(EXPERTS)])
        model.step(resident, tokens(16, 0))
        assert (resident.counts.streamed, resident.counts.passes) == (0, 1)


class TestAccounts:
    def test_a_pool_is_weights_on_a_gpu(self) -> None:
        runner = SimpleNamespace(device=torch.device("cuda"), model_memory_usage=100)
        add_to_weights(runner, 20)
        assert runner.model_memory_usage == 120
        add_to_weights(SimpleNamespace(device=torch.device("cpu")), 20)

    @pytest.mark.parametrize(("given", "wanted"), [(77, 77), (None, int(300 * KV_SLACK))])
    def test_the_kv_cache_is_what_was_said_or_one_long_request(
        self, given: int | None, wanted: int
    ) -> None:
        specs = {n: SimpleNamespace(max_memory_usage_bytes=lambda _, n=n: n) for n in (100, 200)}
        worker: Any = SimpleNamespace(
            cache_config=SimpleNamespace(kv_cache_memory_bytes=given),
            vllm_config=None,
            get_kv_cache_spec=lambda: specs,
        )
        assert kv_cache_bytes(worker) == wanted

    def test_profiling_leaves_the_settings_as_they_were(self) -> None:
        config = SimpleNamespace(kv_cache_memory_bytes=5)

        def profile() -> None:
            with profiling_first(config):
                assert config.kv_cache_memory_bytes is None
                raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory"):
            profile()
        assert config.kv_cache_memory_bytes == 5
