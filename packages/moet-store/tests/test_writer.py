import errno
import os
import pickle
import subprocess
from pathlib import Path

import numpy as np
import pytest

from moet_store import (
    PackErrorKind,
    PackReader,
    PackWriter,
    StripedWriter,
    aligned_buffer,
    bytes_identity,
    find_packs,
    open_pack,
    pack_path,
)
from moet_store import files as store_files
from moet_store.manifest import manifest_path


def read_rows(paths, spec, **options):
    """Read every row of the packs; returns key -> payload."""
    rows = {}
    with PackReader(paths, **options) as reader:
        buffer = aligned_buffer(spec.row_bytes)
        for key in reader.written_keys():
            reader.submit([key], [buffer])
            (completion,) = reader.wait()
            assert completion.error is None, completion.error
            rows[key] = np.frombuffer(bytes(buffer[: spec.payload_bytes]), dtype=np.uint8)
            assert not any(buffer[spec.payload_bytes :])
    return rows


def test_rows_come_back(make_pack, row_of):
    path, spec = make_pack()
    rows = read_rows([path], spec)
    assert list(rows) == [(layer, expert) for layer in spec.layers for expert in spec.held]
    for key, row in rows.items():
        np.testing.assert_array_equal(row, row_of(spec, *key))


def test_padded_rows_are_the_same_pack(tmp_path, make_pack, make_spec, rows_of, folder_bytes):
    make_pack(tmp_path / "a")
    spec = make_spec()
    (tmp_path / "b").mkdir()
    with PackWriter(tmp_path / "b", spec) as writer:
        for layer in spec.layers:
            rows = [bytes(row).ljust(spec.row_bytes, b"\0") for row in rows_of(spec, layer)]
            writer.write_layer(layer, rows)
    assert folder_bytes(tmp_path / "a") == folder_bytes(tmp_path / "b")


def test_the_order_of_layers_leaves_no_trace(tmp_path, make_pack, folder_bytes):
    make_pack(tmp_path / "a")
    make_pack(tmp_path / "b", written=(5, 1, 2))
    assert folder_bytes(tmp_path / "a") == folder_bytes(tmp_path / "b")


def test_a_finished_layer_is_not_touched(make_pack, tmp_path):
    _, spec = make_pack(written=(2,))
    with PackWriter(tmp_path, spec) as writer:
        assert writer.missing == (1, 5)
        assert writer.write_layer(2, None) is False


def test_two_writers_merge(tmp_path, make_spec, rows_of, make_pack, folder_bytes):
    spec = make_spec()
    folder = tmp_path / "two"
    folder.mkdir()
    with PackWriter(folder, spec) as first, PackWriter(folder, spec) as second:
        first.write_layer(1, rows_of(spec, 1))
        second.write_layer(5, rows_of(spec, 5))
        first.write_layer(2, rows_of(spec, 2))
        assert first.missing == second.missing == ()
    make_pack(tmp_path / "one")
    assert folder_bytes(folder) == folder_bytes(tmp_path / "one")


def test_two_writers_of_one_layer_exclude_each_other(tmp_path, make_spec, rows_of, refused):
    spec = make_spec()

    def rows():
        with refused(PackErrorKind.LAYER_BUSY) as caught:
            second.write_layer(1, [])
        assert caught.value.layer == 1
        yield from rows_of(spec, 1)

    with PackWriter(tmp_path, spec) as first, PackWriter(tmp_path, spec) as second:
        assert first.write_layer(1, rows())
        assert second.write_layer(1, []) is False


def test_progress_counts_rows(tmp_path, make_spec, rows_of):
    spec, seen = make_spec(), []
    with PackWriter(tmp_path, spec, seen.append) as writer:
        writer.write_layer(2, rows_of(spec, 2))
    assert [(p.layer, p.rows, p.of) for p in seen] == [(2, n, 4) for n in (1, 2, 3, 4)]


WRONG_ROWS = {"few": [bytes(5000)] * 3, "many": [bytes(5000)] * 5, "short": [bytes(4999)] * 4}


@pytest.mark.parametrize("rows", WRONG_ROWS.values(), ids=WRONG_ROWS)
def test_wrong_rows_are_refused_and_name_nothing(tmp_path, make_spec, rows, refused):
    with PackWriter(tmp_path, make_spec()) as writer:
        with refused(PackErrorKind.ROW_INVALID) as caught:
            writer.write_layer(2, rows)
        assert caught.value.layer == 2
        assert writer.missing == (1, 2, 5)


def test_a_layer_that_does_not_exist_is_refused(tmp_path, make_spec, refused):
    with PackWriter(tmp_path, make_spec()) as writer, refused(PackErrorKind.ROW_MISSING):
        writer.write_layer(3, [])


def test_data_is_synced_before_the_manifest_names_it(tmp_path, make_spec, rows_of, monkeypatch):
    spec = make_spec(layers=(7,), experts=2)
    calls = []

    def record(name, shown):
        real = getattr(os, name)

        def call(*args, **kwargs):
            calls.append((name, shown(*args)))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    def target(fd, *_):
        return Path(f"/proc/self/fd/{fd}").readlink().name

    with PackWriter(tmp_path, spec) as writer:
        for name in ("pwrite", "fdatasync", "fsync"):
            record(name, target)
        record("rename", lambda old, new: Path(new).name)
        record("replace", lambda old, new: Path(new).name)
        writer.write_layer(7, rows_of(spec, 7))
    pack, manifest = writer.path.name, manifest_path(writer.path).name
    assert calls == [
        ("pwrite", pack),
        ("pwrite", pack),
        ("fdatasync", pack),
        ("pwrite", f"{manifest}.new"),
        ("fsync", f"{manifest}.new"),
        ("replace", manifest),
        ("fsync", tmp_path.name),
    ]


FAULTS = [
    (call, code)
    for call in ("pwrite", "fdatasync", "fsync", "posix_fallocate", "replace")
    for code in (errno.EIO, errno.ENOSPC)
]


@pytest.mark.parametrize(("call", "code"), FAULTS)
def test_a_fault_leaves_a_pack_that_resumes(
    tmp_path, make_spec, make_pack, rows_of, folder_bytes, monkeypatch, refused, call, code
):
    spec = make_spec()
    make_pack(tmp_path / "whole")
    folder = tmp_path / "pack"
    folder.mkdir()

    def fail(*args):
        raise OSError(code, os.strerror(code))

    with PackWriter(folder, spec) as writer:
        writer.write_layer(1, rows_of(spec, 1))
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            kind = PackErrorKind.NO_SPACE if code == errno.ENOSPC else PackErrorKind.IO
            with refused(kind) as caught:
                writer.write_layer(2, rows_of(spec, 2))
        assert "write layer 2" in str(caught.value)
        assert writer.missing == (2, 5)
    make_pack(folder, spec)
    assert folder_bytes(folder) == folder_bytes(tmp_path / "whole")


def test_writes_may_be_taken_in_parts(tmp_path, make_pack, monkeypatch, folder_bytes):
    make_pack(tmp_path / "whole")
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:1000], at))
    make_pack(tmp_path / "parts")
    assert folder_bytes(tmp_path / "parts") == folder_bytes(tmp_path / "whole")


def test_a_write_without_progress_is_an_error(tmp_path, make_spec, monkeypatch, refused):
    with PackWriter(tmp_path, make_spec()) as writer:
        monkeypatch.setattr(os, "pwrite", lambda *_: 0)
        with refused(PackErrorKind.IO):
            writer.write_layer(1, [bytes(5000)] * 4)


def test_a_file_system_without_fallocate_is_written(tmp_path, make_pack, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    path, spec = make_pack()
    assert open_pack(path).manifest.written == spec.layers


def test_room_is_checked_first(tmp_path, make_spec, monkeypatch, refused):
    monkeypatch.setattr("moet_store.writer.free_bytes", lambda _: 3 * 4 * 8192 - 1)
    with refused(PackErrorKind.NO_SPACE) as caught:
        PackWriter(tmp_path, make_spec())
    assert "98,304 bytes for 3 layers" in caught.value.wanted
    assert not list(tmp_path.glob("*.pack"))


def test_room_for_the_missing_layers_is_enough(make_pack, monkeypatch):
    _, spec = make_pack(written=(1, 2))
    monkeypatch.setattr("moet_store.writer.free_bytes", lambda _: 4 * 8192)
    make_pack(spec=spec)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_file_system(tmp_path, make_spec, make_pack, rows_of, refused):
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"mount is refused here: {mounted.stderr.decode().strip()}")
    try:
        spec = make_spec()
        with PackWriter(folder, spec) as writer:
            writer.write_layer(1, rows_of(spec, 1))
            hog = folder / "hog"
            with pytest.raises(OSError, match="No space"):
                hog.write_bytes(bytes(2**20))
            with refused(PackErrorKind.NO_SPACE):
                writer.write_layer(2, rows_of(spec, 2))
            assert writer.missing == (2, 5)
            hog.unlink()
            for layer in (2, 5):
                writer.write_layer(layer, rows_of(spec, layer))
        assert len(read_rows([writer.path], spec)) == 12
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("field", ["checkpoint", "codec", "rank"])
def test_another_pack_under_the_name_is_refused(tmp_path, make_pack, make_spec, refused, field):
    other = {"checkpoint": bytes_identity(b"other"), "codec": "w2", "rank": 1}[field]
    path, _ = make_pack()
    wanted = make_spec(**{field: other, "size": 2})
    path.rename(pack_path(tmp_path, wanted))
    with refused(PackErrorKind.OTHER_PACK) as caught:
        PackWriter(tmp_path, wanted)
    assert str(other) in caught.value.wanted


def test_a_replaced_pack_is_noticed(tmp_path, make_spec, rows_of, refused):
    spec = make_spec()
    with PackWriter(tmp_path, spec) as writer:
        copy = writer.path.with_name("copy")
        copy.write_bytes(writer.path.read_bytes())
        copy.replace(writer.path)
        with refused(PackErrorKind.IO) as caught:
            writer.write_layer(1, rows_of(spec, 1))
    assert "another file in its place" in str(caught.value)


def test_a_missing_folder_is_an_error(tmp_path, make_spec, refused):
    with refused(PackErrorKind.IO):
        PackWriter(tmp_path / "absent", make_spec())


def test_names_tell_packs_apart(tmp_path, make_spec):
    variants = [
        {},
        {"checkpoint": bytes_identity(b"b")},
        {"codec": "w2"},
        {"tier": "fine"},
        {"layers": (1,)},
        {"size": 2},
        {"size": 2, "rank": 1},
        {"stripes": 2},
    ]
    names = {pack_path(tmp_path, make_spec(**fields)) for fields in variants}
    assert len(names) == len(variants)


def test_stripes_hold_every_expert_once(tmp_path, make_spec, rows_of, row_of):
    spec = make_spec(experts=5)
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
    with StripedWriter(folders, spec) as writer:
        for layer in spec.layers:
            assert writer.write_layer(layer, rows_of(spec, layer))
            assert not writer.write_layer(layer, rows_of(spec, layer))
        assert writer.missing == ()
    paths = [find_packs(folder)[0] for folder in folders]
    assert [list(open_pack(path).spec.held) for path in paths] == [[0, 3], [1, 4], [2]]
    for key, row in read_rows(paths, spec).items():
        np.testing.assert_array_equal(row, row_of(spec, *key))


def test_a_layer_is_missing_until_every_stripe_has_it(tmp_path, make_spec, rows_of, refused):
    spec = make_spec()
    with StripedWriter([tmp_path, tmp_path], spec) as writer:
        first = writer.writers[0]
        first.write_layer(1, rows_of(first.spec, 1))
        assert writer.missing == (1, 2, 5)
        assert writer.write_layer(1, rows_of(spec, 1))
        assert writer.missing == (2, 5)


def test_errors_cross_process_borders(tmp_path, make_spec, refused):
    with refused(PackErrorKind.IO) as caught:
        PackWriter(tmp_path / "absent", make_spec())
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.kind, str(copy)) == (caught.value.kind, str(caught.value))


def test_replacing_a_file_keeps_the_old_one_on_a_fault(tmp_path, monkeypatch):
    path = tmp_path / "file"
    store_files.replace_file(path, b"old")

    def fail(_):
        raise OSError(errno.EIO, "bad")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="bad"):
        store_files.replace_file(path, b"new")
    assert path.read_bytes() == b"old"
