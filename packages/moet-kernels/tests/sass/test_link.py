import struct
from pathlib import Path

import msgspec
import pytest

from moet_kernels.sass.arch import SM120A
from moet_kernels.sass.assemble import assemble
from moet_kernels.sass.cases import kernel_source
from moet_kernels.sass.cubin import Attribute, Cubin
from moet_kernels.sass.errors import SassError
from moet_kernels.sass.link import link
from moet_kernels.sass.listing import NOP
from moet_kernels.sass.schedule import tuned

TWIN = Path(__file__).parent / "data/copy.sm_90a.cubin"
COUNT, MOST, EXITS, REQUIRED = 0x2F, 0x1B, 0x1C, 0x34


@pytest.fixture
def program(table):
    return tuned(kernel_source("copy"), table)


@pytest.fixture
def words(program, table):
    return assemble(program, table)


def image_of(program, words):
    return Cubin(link(TWIN.read_bytes(), program, words))


def refusal(program, words, twin=None):
    with pytest.raises(SassError) as caught:
        link(twin or TWIN.read_bytes(), program, words)
    return str(caught.value)


def changed_twin(change):
    cubin = Cubin(TWIN.read_bytes())
    attributes = cubin.attributes(".nv.info.copy")
    cubin.set_attributes(".nv.info.copy", change(attributes))
    return cubin.build()


def test_building_anew_changes_no_byte():
    assert Cubin(TWIN.read_bytes()).build() == TWIN.read_bytes()


def test_two_registers_more_than_the_code_names_are_counted(program, words):
    assert Cubin(TWIN.read_bytes()).registers("copy") == 32
    assert program.registers == 40
    assert image_of(program, words).registers("copy") == 42


def test_the_count_never_falls(program, words):
    few = msgspec.structs.replace(program, registers=8)
    assert image_of(few, words).registers("copy") == 32


def test_more_registers_than_there_are(program, words):
    many = msgspec.structs.replace(program, registers=254)
    assert "names 254 registers; 2 more are reserved" in refusal(many, words)


def test_more_registers_than_the_twin_was_compiled_for(program, words):
    def limited(attributes):
        return [msgspec.structs.replace(a, value=41) if a.code == MOST else a for a in attributes]

    assert "compiled for 41 at most" in refusal(program, words, changed_twin(limited))


def test_the_code_ends_as_compiled_code_does(program, words):
    found, twin = image_of(program, words).words("copy"), Cubin(TWIN.read_bytes()).words("copy")
    trap = next(word for word in reversed(twin) if word != NOP)
    assert found[: len(words)] == words
    assert found[len(words)] == trap
    assert set(found[len(words) + 1 :]) == {NOP}
    assert (len(found) % 8, len(found) - len(words) <= 8) == (0, True)


@pytest.mark.parametrize("copies", [1, 3])
def test_sizes_follow_the_code(copies, program, words):
    cubin = image_of(program, words * copies)
    size = len(cubin.section(".text.copy").data)
    symbols = cubin.section(".symtab").data
    assert struct.unpack_from("<Q", symbols, cubin.symbol("copy") * 24 + 16) == (size,)
    place, _, _ = struct.unpack("<QQq", cubin.section(".rela.debug_frame").data)
    frame = cubin.section(".debug_frame").data
    assert struct.unpack_from("<Q", frame, place + 8) == (size,)


def test_exits_are_listed(program, words):
    cubin = image_of(program, words)
    (listed,) = [a.payload for a in cubin.attributes(".nv.info.copy") if a.code == EXITS]
    assert list(struct.unpack(f"<{len(listed) // 4}I", listed)) == program.exits


def test_nothing_else_changes(program, words):
    ours, twin = image_of(program, words), Cubin(TWIN.read_bytes())
    moved = {".text.copy", ".symtab", ".nv.info", ".nv.info.copy", ".debug_frame"}
    assert [s.name for s in ours.sections] == [s.name for s in twin.sections]
    for mine, theirs in zip(ours.sections, twin.sections, strict=True):
        if mine.name not in moved:
            assert mine.data == theirs.data, mine.name
        assert mine.fields[:3] + mine.fields[6:] == theirs.fields[:3] + theirs.fields[6:]


def test_a_twin_that_lists_places_in_its_code_is_refused(program, words):
    def with_targets(attributes):
        return [*attributes, Attribute(4, REQUIRED, 0, bytes(12))]

    assert "attribute 0x34" in refusal(program, words, changed_twin(with_targets))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": "cpy"}, "no section .text.cpy; it has kernels ['copy']"),
        ({"parameters": 24}, "declares 24 bytes of parameters, its twin takes 20"),
        ({"shared": 16}, "declares 16 bytes of shared memory, its twin has 0"),
        ({"arch": SM120A}, "program is for sm_120a, its twin for sm_90a"),
    ],
)
def test_a_twin_that_does_not_fit_is_refused(change, message, program, words):
    assert message in refusal(msgspec.structs.replace(program, **change), words)


def test_a_device_function_has_no_parameters():
    cubin = Cubin(TWIN.read_bytes())
    assert cubin.parameter_bytes("copy") == 20
    cubin.section(".nv.constant0.copy").name = "gone"
    assert cubin.parameter_bytes("copy") == 0


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"MZ" + bytes(200)])
def test_what_is_no_cubin_is_refused(data):
    with pytest.raises(SassError, match="no cubin"):
        Cubin(data)


@pytest.mark.parametrize("cut", [64, 200, 1000])
def test_a_cut_cubin_is_refused(cut):
    with pytest.raises(SassError, match="no cubin"):
        Cubin(TWIN.read_bytes()[:cut])
