"""Memory that direct reads can go to."""

import mmap

import numpy as np

from moet_core.row import ROW_ALIGNMENT

__all__ = ["address_of", "aligned_buffer"]


def aligned_buffer(length: int) -> memoryview:
    """Return zeroed, page-aligned, writable memory; it is freed with its last view.

    Args:
        length: Bytes, above 0.
    """
    region = mmap.mmap(-1, -(-length // ROW_ALIGNMENT) * ROW_ALIGNMENT)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Pinning a row for the device then touches a handful of pages, not thousands.
        region.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(region)[:length]


def address_of(buffer: memoryview) -> int:
    """Return where a buffer lies."""
    return int(np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0])
