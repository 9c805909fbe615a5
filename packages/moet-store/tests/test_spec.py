import json
import struct
from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from moet_core.row import row_layout
from moet_store import PackError, PackErrorKind, PackSpec, expert_spec
from moet_store.spec import HEADER_BYTES, check_same, decode_header, encode_header

PATH = Path("a.pack")
CHECKPOINT = "0123456789abcdef" * 4

# Written by hand from docs/pack-format.md.
JSON = (
    b'{"checkpoint":"0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",'
    b'"codec":"raw","layout":"rows-v1","tier":"base","hidden":64,"intermediate":32,'
    b'"payload_bytes":5000,"layers":[1,2,5],"experts":4,"rank":0,"size":1,"stripe":0,"stripes":1}'
)
HEADER = b"MOETPACK" + b"\x01\0\0\0" + b"\xf9\0\0\0" + JSON + bytes(HEADER_BYTES - 16 - 249 - 8)
HEADER += b"\x86\x24\x25\xc4\x71\x2f\x70\x89"


def sealed(body, version=1, length=None, magic=b"MOETPACK"):
    """Make a header around any body, with a good checksum."""
    page = struct.pack("<8sII", magic, version, len(body) if length is None else length) + body
    page = page.ljust(HEADER_BYTES - 8, b"\0")
    return page + struct.pack("<Q", xxhash.xxh3_64_intdigest(page))


def changed(**fields):
    return sealed(json.dumps(json.loads(JSON) | fields, separators=(",", ":")).encode())


@pytest.fixture
def spec(make_spec):
    return make_spec(checkpoint=CHECKPOINT)


def test_header_is_these_bytes(spec):
    assert len(JSON) == 249
    assert encode_header(spec) == HEADER


def test_these_bytes_are_the_header(spec):
    assert decode_header(HEADER, PATH) == spec


names = st.text("abcdefghijklmnopqrstuvwxyz0123456789-_.", min_size=1, max_size=64)


@st.composite
def specs(draw):
    experts = draw(st.integers(1, 2**16))
    stripes = draw(st.integers(1, experts))
    size = draw(st.integers(1, 2**16))
    return PackSpec(
        checkpoint=draw(st.text("0123456789abcdef", min_size=64, max_size=64)),
        codec=draw(names),
        layout=draw(names),
        tier=draw(names),
        hidden=draw(st.integers(1, 2**31)),
        intermediate=draw(st.integers(1, 2**31)),
        payload_bytes=draw(st.integers(1, 2**30)),
        layers=tuple(sorted(draw(st.sets(st.integers(0, 2**16), min_size=1, max_size=200)))),
        experts=experts,
        size=size,
        rank=draw(st.integers(0, size - 1)),
        stripes=stripes,
        stripe=draw(st.integers(0, stripes - 1)),
    )


@given(specs())
def test_decoding_returns_what_was_encoded(spec):
    assert decode_header(encode_header(spec), PATH) == spec


@given(specs())
def test_rows_tile_the_file(spec):
    ends = []
    for layer in (spec.layers[0], spec.layers[-1]):
        for expert in (spec.held[0], spec.held[-1]):
            offset = spec.offset(layer, expert)
            assert offset % 4096 == 0
            ends.append(offset + spec.row_bytes)
    assert spec.offset(spec.layers[0], spec.held[0]) == HEADER_BYTES
    assert ends[-1] == spec.file_bytes


@given(st.binary(max_size=HEADER_BYTES))
def test_no_bytes_crash_the_decoder(data):
    with pytest.raises(PackError):
        decode_header(b"MOETPACK" + data, PATH)


@given(st.binary(max_size=300))
def test_no_sealed_body_crashes_the_decoder(body):
    with pytest.raises(PackError):
        decode_header(sealed(body), PATH)


@pytest.mark.parametrize("page", [b"", b"\0" * 4096, b"version https://git-lfs", b"MOETROWS"])
def test_not_a_pack(page, refused):
    with refused(PackErrorKind.NOT_A_PACK):
        decode_header(page, PATH)


def test_wrong_size(refused):
    with refused(PackErrorKind.WRONG_SIZE):
        decode_header(HEADER[:-1], PATH)


def test_version(refused):
    with refused(PackErrorKind.VERSION) as caught:
        decode_header(sealed(JSON, version=2), PATH)
    assert (caught.value.wanted, caught.value.found) == ("format version 1", "2")


HEADER_DAMAGED = {
    "flipped": HEADER[:100] + bytes([HEADER[100] ^ 1]) + HEADER[101:],
    "checksum": HEADER[:-1] + b"\0",
    "length above the page": sealed(JSON, length=4073),
    "length of 4 GiB": sealed(JSON, length=2**32 - 1),
    "length too short": sealed(JSON, length=200),
    "length zero": sealed(JSON, length=0),
    "no JSON": sealed(b"{"),
    "no object": sealed(b"[1]"),
    "not UTF-8": sealed(b"\xff" + JSON),
    "bytes behind the JSON": sealed(JSON + b"\0\0polyglot", length=len(JSON)),
    "spaces in the JSON": sealed(JSON.replace(b",", b", ")),
    "another order": sealed(JSON[:-1].replace(b'"codec":"raw",', b"") + b',"codec":"raw"}'),
    "a field twice": sealed(JSON[:-1] + b',"stripes":1}'),
    "an unknown field": changed(mtime=1),
    "a missing field": sealed(JSON.replace(b'"experts":4,', b"")),
    "a number for a name": changed(codec=2),
    "a truth value for a number": changed(rank=False),
    "a fraction": changed(experts=4.5),
    "nested 500 deep": sealed(b"[" * 500),
}


@pytest.mark.parametrize("page", HEADER_DAMAGED.values(), ids=HEADER_DAMAGED)
def test_header_damaged(page, refused):
    with refused(PackErrorKind.HEADER_DAMAGED):
        decode_header(page, PATH)


SPEC_INVALID = {
    "checkpoint": ["", "0" * 63, "0" * 65, "G" * 64, "A" * 64],
    "codec": ["", "W2", "../up", "a" * 65, "nul\0"],
    "layout": [""],
    "tier": ["", "a/b"],
    "hidden": [0, -1],
    "intermediate": [0],
    "payload_bytes": [0, 2**30 + 1],
    "layers": [[], [2, 1], [1, 1], [-1], [2**16 + 1]],
    "experts": [0, 2**16 + 1, 10**39],
    "size": [0],
    "rank": [1, -1],
    "stripes": [0, 5],
    "stripe": [1],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, bad in SPEC_INVALID.items() for value in bad]
)
def test_spec_invalid(field, value, refused):
    with refused(PackErrorKind.SPEC_INVALID) as caught:
        decode_header(changed(**{field: value}), PATH)
    assert caught.value.field == field


@pytest.mark.parametrize(("field", "value"), [("rank", 3), ("codec", "W2"), ("layers", ())])
def test_an_invalid_spec_is_not_written(spec, field, value, refused):
    with refused(PackErrorKind.SPEC_INVALID):
        encode_header(msgspec.structs.replace(spec, **{field: value}))


def test_more_layers_than_a_page_names_are_not_written(spec, refused):
    with refused(PackErrorKind.SPEC_INVALID) as caught:
        encode_header(msgspec.structs.replace(spec, layers=tuple(range(2000))))
    assert caught.value.field == "layers"


OTHER = {
    "checkpoint": "f" * 64,
    "codec": "w2",
    "layout": "rows-v2",
    "tier": "fine",
    "hidden": 32,
    "intermediate": 64,
    "payload_bytes": 4999,
    "layers": (1, 2),
    "experts": 5,
    "rank": 1,
    "size": 2,
    "stripe": 1,
    "stripes": 2,
}


def test_every_field_is_compared():
    assert set(OTHER) == set(PackSpec.__struct_fields__)


@pytest.mark.parametrize("field", OTHER)
def test_the_field_that_differs_is_named_with_both_values(spec, field, refused):
    other = msgspec.structs.replace(spec, **{field: OTHER[field]})
    with refused(PackErrorKind.OTHER_PACK) as caught:
        check_same(spec, other, PATH)
    shown = [
        repr(list(value) if isinstance(value, tuple) else value)
        for value in (getattr(spec, field), OTHER[field])
    ]
    assert caught.value.field == field
    assert f"wanted {field} {shown[0]}, found {field} {shown[1]}" in str(caught.value)


def test_expert_rows_describe_themselves():
    layout = row_layout("w2", 4096, 2048)
    spec = expert_spec(layout, checkpoint=CHECKPOINT, layers=(3, 4), experts=256, rank=1, size=2)
    assert (spec.codec, spec.layout) == ("w2", "w2-frag16-v1")
    assert (spec.payload_bytes, spec.row_bytes) == (layout.payload_bytes, layout.row_bytes)
    assert (spec.hidden, spec.intermediate, spec.rank, spec.size) == (4096, 2048, 1, 2)
