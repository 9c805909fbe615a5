"""Memory that direct reads can go to."""

import mmap

import numpy as np

from moet_core.row import ROW_ALIGNMENT

__all__ = ["HUGE_PAGE", "address_of", "aligned_buffer"]

HUGE_PAGE = 2**21


def aligned_buffer(length: int) -> memoryview:
    """Return zeroed, page-aligned, writable memory; it is freed with its last view.

    From a huge page (2 MiB) on it starts on one and asks the kernel for huge pages. A child of
    `fork` does not have it.

    Args:
        length: Bytes, above 0.
    """
    align = HUGE_PAGE if length >= HUGE_PAGE else ROW_ALIGNMENT
    size = -(-length // align) * align
    if align == HUGE_PAGE:
        # Where a mapping starts is the kernel's choice.
        size += HUGE_PAGE
    # Private: most systems have no huge pages for shared memory.
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):
        # Pages that a drive writes to are pinned: fork would copy every one of them.
        region.madvise(mmap.MADV_DONTFORK)
    if align == HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        # A drive is then told of a row in a few pieces, not in thousands.
        region.madvise(mmap.MADV_HUGEPAGE)
    data = memoryview(region)
    start = -address_of(data) % align
    return data[start : start + length]


def address_of(buffer: memoryview) -> int:
    """Return where a buffer lies."""
    return int(np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0])
