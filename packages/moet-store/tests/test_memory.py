"""What `aligned_buffer` asks of the kernel."""

import os
import re
from pathlib import Path

import pytest

from moet_store import aligned_buffer
from moet_store.memory import HUGE_PAGE, address_of

MIB = 2**20
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def mapping(buffer, process="self"):
    """Return the first line and the flags of the mapping that holds a buffer, None if none does."""
    address = address_of(buffer)
    text = Path(f"/proc/{process}/smaps").read_text()
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        first, last = (int(part, 16) for part in block.split()[0].split("-"))
        if first <= address < last:
            assert address + len(buffer) <= last
            return block.splitlines()[0], re.search("VmFlags: (.*)", block)[1].split()
    return None


@pytest.mark.parametrize("length", [1, 4096, 2 * MIB - 1, 2 * MIB, 7 * MIB + 1])
def test_length_alignment_and_content(length):
    buffer = aligned_buffer(length)
    assert len(buffer) == length
    assert not buffer.readonly
    assert address_of(buffer) % (HUGE_PAGE if length >= HUGE_PAGE else 4096) == 0
    assert bytes(buffer) == bytes(length)
    buffer[:] = b"x" * length


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="the kernel has no huge pages")
@pytest.mark.parametrize(("length", "huge"), [(4096, False), (2 * MIB, True), (7 * MIB, True)])
def test_private_memory_with_huge_pages(length, huge):
    buffer = aligned_buffer(length)
    line, flags = mapping(buffer)
    assert line.split()[1] == "rw-p"
    assert ("hg" in flags) == huge


@pytest.mark.parametrize("length", [4096, 7 * MIB])
def test_a_forked_child_has_it_not(length):
    buffer = aligned_buffer(length)
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        os.read(readable, 1)
        os._exit(0)
    try:
        assert mapping(buffer) is not None
        assert mapping(buffer, child) is None
    finally:
        os.write(writable, b"x")
        os.waitpid(child, 0)
        os.close(readable)
        os.close(writable)


def test_a_mapping_that_starts_anywhere(monkeypatch):
    """As kernels before 6.7 make them: here one page behind a huge page's start."""
    monkeypatch.setattr("moet_store.memory.address_of", lambda data: address_of(data) + 4096)
    buffer = aligned_buffer(7 * MIB)
    assert len(buffer) == 7 * MIB
    assert (address_of(buffer) + 4096) % HUGE_PAGE == 0
