"""Single flipped bits, anywhere in a pack and its manifest: none may be served."""

import random

import pytest

from moet_store import PackError, PackReader, PackWriter, aligned_buffer, open_pack, verify_pack
from moet_store.manifest import HEAD_BYTES, manifest_path
from moet_store.spec import HEADER_BYTES

ROW_FLIPS = 600
MANIFEST_FLIPS = 250
HEADER_FLIPS = 150


@pytest.fixture(scope="module")
def pack(tmp_path_factory, make_spec, rows_of):
    spec = make_spec(layers=(1, 2, 5), experts=4)
    with PackWriter(tmp_path_factory.mktemp("pack"), spec) as writer:
        for layer in (1, 5):
            writer.write_layer(layer, rows_of(spec, layer))
    return writer.path, spec


class Flipped:
    """A file with one bit flipped, for as long as the block runs."""

    def __init__(self, path, bit):
        self.path, self.bit = path, bit

    def flip(self):
        with self.path.open("r+b", buffering=0) as file:
            file.seek(self.bit // 8)
            (byte,) = file.read(1)
            file.seek(self.bit // 8)
            file.write(bytes([byte ^ 1 << self.bit % 8]))

    def __enter__(self):
        self.flip()

    def __exit__(self, *_):
        self.flip()


def test_flips_in_rows(pack):
    path, spec = pack
    chance = random.Random(1)
    buffer = aligned_buffer(spec.row_bytes)
    with PackReader([path]) as reader:
        for _ in range(ROW_FLIPS):
            layer, expert = chance.choice([1, 5]), chance.randrange(spec.experts)
            bit = spec.offset(layer, expert) * 8 + chance.randrange(spec.row_bytes * 8)
            with Flipped(path, bit):
                reader.submit([(layer, expert)], [buffer])
                (completion,) = reader.wait()
            error = completion.error
            assert error is not None
            assert (error.path, error.layer, error.expert) == (path, layer, expert)
        assert reader.counters.checksum_errors == ROW_FLIPS
        for key in reader.written_keys():
            reader.submit([key], [buffer])
            assert reader.wait()[0].error is None


def test_flips_in_the_manifest(pack):
    path, spec = pack
    manifest = manifest_path(path)
    chance = random.Random(2)
    for _ in range(MANIFEST_FLIPS):
        bit = chance.randrange(manifest.stat().st_size * 8)
        with Flipped(manifest, bit), pytest.raises(PackError) as caught:
            open_pack(path)
        assert caught.value.path == manifest
        if bit // 8 >= HEAD_BYTES:
            layer, expert = divmod((bit // 8 - HEAD_BYTES) // 16, spec.experts)
            found = (caught.value.layer, caught.value.expert)
            assert found == (spec.layers[layer], expert)
    assert open_pack(path).manifest.written == (1, 5)


def test_flips_in_the_header(pack):
    path, _ = pack
    chance = random.Random(3)
    for _ in range(HEADER_FLIPS):
        with Flipped(path, chance.randrange(HEADER_BYTES * 8)), pytest.raises(PackError) as caught:
            open_pack(path)
        assert caught.value.path == path


def test_the_deep_check_names_every_bad_row(pack):
    path, spec = pack
    with Flipped(path, spec.offset(1, 3) * 8), Flipped(path, spec.offset(5, 0) * 8 + 9):
        report = verify_pack(path, deep=True)
    bad = [(problem.kind, problem.layer, problem.expert) for problem in report.problems]
    assert bad == [("ROW_MISSING", 2, None), ("ROW_DAMAGED", 1, 3), ("ROW_DAMAGED", 5, 0)]
    assert {problem.file for problem in report.problems} == {str(path)}
