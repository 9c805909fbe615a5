"""How fast checkpoints are converted: input bytes a second, torch twin and numpy golden."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from moet_core.codecs import get_codec
from moet_core.results import Measurement, measurement
from moet_core.samples import FORMATS, typical_source
from moet_core.sources import Source
from moet_kernels.encode import encode_matrix, from_numpy

__all__ = ["CODECS", "GOLDEN_SHAPE", "SHAPE", "bench_encode"]

CODECS = ("w2", "fp4-mx")

SHAPE = (2048, 4096)
"""The matrix torch encodes: gate or up of one DeepSeek-V4-Flash expert."""

GOLDEN_SHAPE = (128, 4096)
"""The matrix numpy encodes: a part of that is enough at its speed."""


def bench_encode(seconds: float, threads: int = 1) -> list[Measurement]:
    """Measure encoding of every source format to w2 and fp4-mx on the CPU.

    Samples are MB of input a second and core: 10**6 bytes of weights and scales, divided by wall
    time and by `threads`. numpy uses one core. Decisions on a tensor's zeros are included.

    Args:
        seconds: Time for each figure; at least one sample is taken.
        threads: Threads torch may use.
    """
    found = []
    with _torch_threads(threads):
        for source_format in FORMATS:
            matrix = from_numpy(typical_source(source_format, *SHAPE))
            part = typical_source(source_format, *GOLDEN_SHAPE)
            for codec in CODECS:
                rates = _rates(partial(encode_matrix, codec, matrix), matrix, seconds)
                name = f"encode {source_format} to {codec}"
                per_core = [rate / threads for rate in rates]
                found.append(measurement(f"{name}, torch", "MB/s per core", per_core))
                rates = _rates(partial(get_codec(codec).encode, part), part, seconds)
                found.append(measurement(f"{name}, numpy", "MB/s per core", rates))
    return found


def _rates(encode: Callable[[], object], source: Source, seconds: float) -> list[float]:
    """Return MB/s of repeated calls after a first one that warms caches and allocators."""
    megabytes = _input_bytes(source) / 1e6
    encode()
    rates: list[float] = []
    end = time.perf_counter() + seconds
    while not rates or time.perf_counter() < end:
        start = time.perf_counter()
        encode()
        rates.append(megabytes / (time.perf_counter() - start))
    return rates


def _input_bytes(source: Source) -> int:
    arrays = [getattr(source, part, None) for part in ("weight", "nibbles", "scale")]
    return sum(array.nbytes for array in arrays if array is not None)


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
