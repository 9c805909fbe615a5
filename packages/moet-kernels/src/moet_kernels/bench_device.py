"""What a GPU's memory gives, and how long work in a CUDA graph takes."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["copy_bandwidth", "graph_times", "read_bandwidth", "sum_words"]

_BUFFER_BYTES = 2**31
_BLOCK = 4096
_PROGRAMS_PER_PROCESSOR = 8


@triton.jit
def _sum_words(words, sums, count, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(program * BLOCK, count, tl.num_programs(0) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.load(words + place, mask=place < count, other=0)
    tl.store(sums + program, tl.sum(total, 0))


def sum_words(words: Tensor, programs: int) -> Tensor:
    """Sum int32 words modulo 2^32, one sum a program: reads everything and writes nothing else."""
    sums = torch.empty(programs, dtype=torch.int32, device=words.device)
    _sum_words[(programs,)](words, sums, words.numel(), BLOCK=_BLOCK, num_warps=8)
    return sums


def graph_times(calls: Sequence[Callable[[], object]], replays: int) -> list[float]:
    """Return seconds a call, one sample a replay of a CUDA graph of all calls in a row.

    Every call runs once outside first, so that kernels are compiled, and three replays go
    unmeasured.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    milliseconds = [a.elapsed_time(b) for a, b in pairwise(events)]
    return [sample / 1000 / len(calls) for sample in milliseconds]


def read_bandwidth(replays: int) -> list[float]:
    """Return bytes a second of reading 2 GiB of random words."""
    words = _random_words()
    processors = torch.cuda.get_device_properties(words.device).multi_processor_count
    programs = _PROGRAMS_PER_PROCESSOR * processors
    wanted = int(words.sum()) & 0xFFFFFFFF
    found = int(sum_words(words, programs).sum()) & 0xFFFFFFFF
    if found != wanted:
        raise RuntimeError(f"the read kernel sums to {found:#x}, torch to {wanted:#x}")
    times = graph_times([lambda: sum_words(words, programs)], replays)
    return [words.nbytes / seconds for seconds in times]


def copy_bandwidth(replays: int) -> list[float]:
    """Return bytes a second, read and written ones, of copying 2 GiB on the device."""
    words = _random_words()
    copy = torch.empty_like(words)
    times = graph_times([lambda: copy.copy_(words)], replays)
    return [2 * words.nbytes / seconds for seconds in times]


def _random_words() -> Tensor:
    return torch.randint(-(2**31), 2**31, (_BUFFER_BYTES // 4,), dtype=torch.int32, device="cuda")
