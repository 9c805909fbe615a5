import struct
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from moet_store import PackError, PackErrorKind
from moet_store.manifest import HEAD_BYTES, Manifest, row_digest, row_hasher
from moet_store.spec import encode_header, header_digest

PATH = Path("a.pack.manifest")
PACK = 0x1122334455667788


@pytest.fixture
def spec(make_spec):
    return make_spec(layers=(1, 5), experts=2)


@pytest.fixture
def written(spec):
    manifest = Manifest.empty(spec, PACK)
    manifest.set_layer(5, [0xA, 0xB])
    return manifest


def head(layers, experts, table, version=1, pack=PACK, tail=bytes(80)):
    digest = xxhash.xxh3_64_intdigest(table)
    data = struct.pack("<8sIIIIQQ", b"MOETROWS", version, layers, experts, 0, pack, digest) + tail
    return data + struct.pack("<Q", xxhash.xxh3_64_intdigest(data)) + table


def entry(layer, expert, digest):
    check = xxhash.xxh3_64_intdigest(struct.pack("<IIQ", layer, expert, digest), seed=PACK)
    return struct.pack("<QQ", digest, check)


TABLE = bytes(32) + entry(5, 0, 0xA) + entry(5, 1, 0xB)


def decode(data, spec):
    return Manifest.decode(data, spec, PACK, PATH)


def test_manifest_is_these_bytes(written):
    assert written.encode() == head(2, 2, TABLE)


def test_these_bytes_are_the_manifest(spec):
    manifest = decode(head(2, 2, TABLE), spec)
    assert manifest.written == (5,)
    assert [manifest.digest(5, 0), manifest.digest(5, 1), manifest.digest(1, 0)] == [10, 11, None]


def test_a_forgotten_layer_is_not_written(written):
    written.forget_layer(5)
    assert written.written == ()


@given(data=st.data())
def test_every_flipped_bit_is_found(data, make_spec):
    spec = make_spec(layers=(1, 5, 9), experts=data.draw(st.integers(1, 5)))
    manifest = Manifest.empty(spec, PACK)
    for layer in data.draw(st.sets(st.sampled_from(spec.layers))):
        manifest.set_layer(layer, [layer * 100 + expert for expert in spec.held])
    good = manifest.encode()
    bit = data.draw(st.integers(0, len(good) * 8 - 1))
    bad = bytearray(good)
    bad[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PackError) as caught:
        decode(bytes(bad), spec)
    if bit // 8 >= HEAD_BYTES:
        layer, expert = divmod((bit // 8 - HEAD_BYTES) // 16, spec.experts)
        assert (caught.value.layer, caught.value.expert) == (spec.layers[layer], expert)


def test_a_zeroed_layer_is_found(spec, written, refused):
    data = written.encode()
    with refused(PackErrorKind.MANIFEST_DAMAGED):
        decode(data[:HEAD_BYTES] + bytes(len(data) - HEAD_BYTES), spec)


def test_of_another_pack(spec, refused):
    with refused(PackErrorKind.OTHER_PACK) as caught:
        decode(head(2, 2, TABLE, pack=7), spec)
    assert "1122334455667788" in caught.value.wanted
    assert "0000000000000007" in caught.value.found


def test_of_another_version(spec, refused):
    with refused(PackErrorKind.VERSION):
        decode(head(2, 2, TABLE, version=2), spec)


@pytest.mark.parametrize("size", [9, 127, 128, 191, 193])
def test_of_another_length(spec, size, refused):
    with refused(PackErrorKind.WRONG_SIZE):
        decode(head(2, 2, TABLE).ljust(size, b"\0")[:size], spec)


DAMAGED = {
    "magic": b"MOETPACK" + head(2, 2, TABLE)[8:],
    "geometry": head(4, 1, TABLE),
    "bytes in the zeros": head(2, 2, TABLE, tail=bytes(79) + b"\1"),
    "empty": b"",
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_damaged(spec, data, refused):
    with refused(PackErrorKind.MANIFEST_DAMAGED):
        decode(data, spec)


def test_the_checksum_of_a_row_depends_on_its_place():
    row = b"row" * 1000
    assert len({row_digest(row, layer, expert) for layer in (0, 1) for expert in (0, 1)}) == 4


def test_a_row_in_pieces_has_the_same_checksum():
    row = bytes(range(256)) * 64
    hasher = row_hasher(3, 7)
    for at in range(0, len(row), 4096):
        hasher.update(row[at : at + 4096])
    assert hasher.intdigest() == row_digest(row, 3, 7) == xxhash.xxh3_64_intdigest(row, 3 << 32 | 7)


def test_the_header_names_the_pack(spec):
    page = encode_header(spec)
    assert header_digest(page) == xxhash.xxh3_64_intdigest(page[:4088])
