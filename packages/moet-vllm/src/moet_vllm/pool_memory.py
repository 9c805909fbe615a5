"""What a pool of experts is in vLLM's account of a device's memory."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from vllm.v1.core.kv_cache_utils import max_memory_usage_bytes

from moet_vllm.residency.resident import ResidentExperts
from moet_vllm.residency.sizing import auto_pool

__all__ = ["add_to_weights", "kv_cache_bytes", "profiling_first", "room_for_pool"]

KV_SLACK = 1.03125
"""Blocks are whole, and one of them holds nobody's tokens."""


def add_to_weights(runner: Any, byte_count: int) -> None:
    """Count a pool as weights: it is allocated after vLLM has measured those.

    What vLLM profiles afterwards is the increase of memory over the pool, so that without this
    the KV cache would be given the pool's memory too. On a CPU vLLM measures the process.
    """
    if runner.device.type != "cpu":
        runner.model_memory_usage += byte_count


def kv_cache_bytes(worker: Any) -> int:
    """Return the memory that a KV cache needs beside `pool=auto`.

    That is `--kv-cache-memory-bytes`, or what one request of the model's full length takes.
    """
    if worker.cache_config.kv_cache_memory_bytes:
        return int(worker.cache_config.kv_cache_memory_bytes)
    specs = worker.get_kv_cache_spec().values()
    return int(KV_SLACK * max_memory_usage_bytes(worker.vllm_config, specs))


@contextlib.contextmanager
def profiling_first(cache_config: Any) -> Iterator[None]:
    """Let vLLM measure what activations take, which it skips where the KV cache's size is given."""
    given = cache_config.kv_cache_memory_bytes
    cache_config.kv_cache_memory_bytes = None
    try:
        yield
    finally:
        cache_config.kv_cache_memory_bytes = given


def room_for_pool(
    resident: ResidentExperts, available: int, kv_cache: int, agree: Callable[[int], int] | None
) -> int:
    """Give a rank the largest pool that fits, the same on all ranks; return the memory left.

    Args:
        resident: The rank's experts, over the least pool.
        available: Bytes that vLLM would give the KV cache beside that pool.
        kv_cache: Bytes that the KV cache needs.
        agree: Largest of the numbers that the ranks pass; None for one rank.

    Raises:
        ConfigError: Not even one layer fits.
    """
    before = resident.pool.rows.nbytes
    room = available + before - kv_cache
    if agree is not None:
        room = -agree(-room)
    resident.resize(auto_pool(resident.shape, room))
    return available + before - resident.pool.rows.nbytes
