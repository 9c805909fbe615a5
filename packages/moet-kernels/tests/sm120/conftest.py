import functools

import pytest

from moet_kernels.sass.assemble import disassemble
from moet_kernels.sass.cubin import Cubin
from moet_kernels.sass.source import parse_source
from moet_kernels.sm120.build import ALL_KERNELS, source_text
from moet_kernels.sm120.manifest import COMPILED, FOLDER, cubin_path, listing_path
from moet_kernels.sm120.write import KERNELS

BY_NAME = {kernel.name: kernel for kernel in ALL_KERNELS}


@functools.cache
def program_of(name, variant="hand"):
    """A kernel's program: "hand" from its text, others from their committed cubins."""
    if variant == "hand":
        text = listing_path(FOLDER, name).read_text() if name in COMPILED else None
        return parse_source(text or source_text(BY_NAME[name]))
    return disassemble(Cubin.open(cubin_path(FOLDER, name, variant)), name)


@pytest.fixture(params=KERNELS, ids=lambda kernel: kernel.name)
def kernel(request):
    """One of the decode kernels."""
    return request.param


@pytest.fixture(scope="session")
def programs():
    """`program_of`; what reads cubins needs nvdisasm."""
    return program_of


@pytest.fixture
def layer():
    """All kernels as they are used, on an emulator of their own."""
    from moet_kernels.sm120.emulated import EmulatedDriver
    from moet_kernels.sm120.layer import Layer

    return Layer(EmulatedDriver(), {name: program_of(name) for name in (*BY_NAME, *COMPILED)})
