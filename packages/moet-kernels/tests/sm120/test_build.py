"""The committed cubins: what they are made from; our audit and NVIDIA's programs take them."""

import re

import pytest

from moet_kernels.committed import digest
from moet_kernels.sass.arch import SM120A
from moet_kernels.sass.assemble import disassemble
from moet_kernels.sass.audit import audit
from moet_kernels.sass.cubin import Cubin
from moet_kernels.sass.source import write_source
from moet_kernels.sass.table import committed_table
from moet_kernels.sass.tools import have_tools, run_tool, tool_version
from moet_kernels.sm120.build import ALL_KERNELS, differences, source_text, sources_of
from moet_kernels.sm120.cases import DECODE, PREFILL
from moet_kernels.sm120.manifest import (
    COMPILED,
    FOLDER,
    cubin_path,
    listing_path,
    read_manifest,
)
from moet_kernels.sm120.write_tiles import TILES_KERNELS

MANIFEST = read_manifest()
ALL = [(name, variant) for name, built in MANIFEST.kernels.items() for variant in built.cubins]
TILES = {kernel.name for kernel in TILES_KERNELS}
BY_HAND = [(name, variant) for name, variant in ALL if name not in COMPILED and variant != "twin"]
needs_tools = pytest.mark.skipif(
    not have_tools("nvcc", "ptxas", "nvdisasm", "cuobjdump"), reason="the CUDA programs are missing"
)


def test_the_manifest_has_every_kernel():
    assert set(MANIFEST.kernels) == {kernel.name for kernel in ALL_KERNELS} | set(COMPILED)
    for name, built in MANIFEST.kernels.items():
        assert set(built.cubins) == ({"twin"} if name in COMPILED else {"tuned", "safe", "twin"})


@pytest.mark.parametrize("name", sorted(MANIFEST.kernels))
def test_sources_and_cubins_are_the_manifests(name):
    built = MANIFEST.kernels[name]
    assert set(built.sources) == set(sources_of(name))
    for source, sha256 in built.sources.items():
        assert digest((FOLDER / source).read_bytes()) == sha256, source
    for variant, sha256 in built.cubins.items():
        assert digest(cubin_path(FOLDER, name, variant).read_bytes()) == sha256, variant


@pytest.mark.parametrize("kernel", ALL_KERNELS, ids=lambda kernel: kernel.name)
def test_the_written_source_is_committed(kernel):
    assert (FOLDER / f"{kernel.name}.sass").read_text() == source_text(kernel)


def test_headers_are_sources():
    assert set(sources_of("sort")) == {
        "sort.cu",
        *(f"{name}.cuh" for name in ("prepare", "tiles", "decode")),
    }


@pytest.mark.parametrize(("name", "variant"), [p for p in ALL if p[0] not in COMPILED])
def test_four_blocks_fit_on_a_processor(name, variant):
    """64 K registers, given out in units of 8 a thread; 100 KiB, of which a block loses 1."""
    built = MANIFEST.kernels[name]
    registers = -(-built.registers[variant] // 8) * 8
    threads = (PREFILL if name in TILES else DECODE).threads
    assert 4 * threads * registers <= 65536
    assert 4 * (built.shared + 1024) <= 100 * 1024
    assert Cubin.open(cubin_path(FOLDER, name, variant)).registers(name) == built.registers[variant]


@needs_tools
@pytest.mark.parametrize("name", COMPILED)
def test_the_listing_is_the_cubins(name):
    program = disassemble(Cubin.open(cubin_path(FOLDER, name, "twin")), name)
    assert listing_path(FOLDER, name).read_text() == write_source(program)


@needs_tools
@pytest.mark.parametrize(("name", "variant"), BY_HAND)
def test_the_audit_finds_nothing(name, variant):
    cubin = Cubin.open(cubin_path(FOLDER, name, variant))
    assert audit(cubin, name, committed_table(SM120A)) == []


@needs_tools
@pytest.mark.parametrize(("name", "variant"), ALL)
def test_nvidias_programs_read_it(name, variant):
    path = cubin_path(FOLDER, name, variant)
    assert f".text.{name}" in run_tool("nvdisasm", [path])
    usage = run_tool("cuobjdump", ["-sass", "-res-usage", path])
    assert f"Function : {name}" in usage
    assert int(re.search(r"REG:(\d+)", usage)[1]) == MANIFEST.kernels[name].registers[variant]


@needs_tools
def test_everything_made_anew_is_the_same():
    if {name: tool_version(name) for name in MANIFEST.tools} != MANIFEST.tools:
        pytest.skip(f"the cubins were made by {MANIFEST.tools}; other compilers give other twins")
    assert differences() == []
