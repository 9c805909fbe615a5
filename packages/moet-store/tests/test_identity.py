import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from moet_store import PackErrorKind, bytes_identity, checkpoint_identity
from moet_store.identity import checkpoint_files, identity_of, recorded_files, write_record


def write_shard(path, header, data):
    body = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(body)) + body + data)


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 64}')
    header = {"a": {"dtype": "U8", "shape": [100000], "data_offsets": [0, 100000]}}
    write_shard(folder / "one.safetensors", header, bytes(100000))
    write_shard(folder / "two.safetensors", header, bytes(100000))
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_it_survives_a_copy(checkpoint, tmp_path):
    copy = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(checkpoint, copy)
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    assert checkpoint_identity(copy) == checkpoint_identity(checkpoint)


def replace_in(path, old, new):
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


def rewrite_last_byte(path):
    path.write_bytes(path.read_bytes()[:-1] + b"\1")


CHANGES = {
    "config": lambda folder: replace_in(folder / "config.json", b"64", b"65"),
    "index": lambda folder: replace_in(folder / "model.safetensors.index.json", b'"b"', b'"c"'),
    "header": lambda folder: replace_in(folder / "two.safetensors", b'"U8"', b'"I8"'),
    "size": lambda folder: os.truncate(folder / "two.safetensors", 110000),
    "data": lambda folder: rewrite_last_byte(folder / "two.safetensors"),
    "shard": lambda folder: replace_in(
        folder / "model.safetensors.index.json", b"two.safetensors", b"one.safetensors"
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_it_changes_with_the_checkpoint(checkpoint, change):
    before = checkpoint_identity(checkpoint)
    change(checkpoint)
    assert checkpoint_identity(checkpoint) != before


def test_without_an_index_all_shards_count(checkpoint):
    (checkpoint / "model.safetensors.index.json").unlink()
    both = checkpoint_identity(checkpoint)
    (checkpoint / "two.safetensors").unlink()
    assert checkpoint_identity(checkpoint) != both


BROKEN = {
    "no config": lambda folder: (folder / "config.json").unlink(),
    "no shard": lambda folder: (folder / "one.safetensors").unlink(),
    "empty shard": lambda folder: (folder / "one.safetensors").write_bytes(b""),
    "git-lfs": lambda folder: (folder / "one.safetensors").write_bytes(b"version https://git"),
    "giant header": lambda folder: (folder / "one.safetensors").write_bytes(
        b"<\0\0\0\0\xff\xff\xff"
    ),
    "index": lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
    "index above": lambda folder: replace_in(
        folder / "model.safetensors.index.json", b"one.safe", b"../one.safe"
    ),
}


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN)
def test_a_broken_checkpoint_has_no_identity(checkpoint, damage, refused):
    damage(checkpoint)
    with refused(PackErrorKind.CHECKPOINT):
        checkpoint_identity(checkpoint)


def test_an_empty_folder_has_no_identity(tmp_path, refused):
    (tmp_path / "config.json").write_text("{}")
    with refused(PackErrorKind.CHECKPOINT):
        checkpoint_identity(tmp_path)


def test_rows_of_no_checkpoint_have_an_identity():
    assert bytes_identity(b"abc").startswith("ba7816bf8f01cfea")


@pytest.fixture
def packs(tmp_path):
    folder = tmp_path / "packs"
    folder.mkdir()
    return folder


def test_the_identity_is_that_of_the_digests_in_order():
    files = {"config.json": "00" * 32, "one.safetensors": "ff" * 32}
    data = b"moet checkpoint identity 2\n"
    for name, digest in files.items():
        for part in (name.encode(), bytes.fromhex(digest)):
            data += struct.pack("<Q", len(part)) + part
    assert identity_of(files) == hashlib.sha256(data).hexdigest()


def test_a_record_stands_for_shards_that_were_deleted(checkpoint, packs):
    whole = checkpoint_files(checkpoint)
    path = write_record(packs, whole)
    assert path.name == f"{checkpoint_identity(checkpoint)[:16]}.checkpoint.json"
    (checkpoint / "two.safetensors").unlink()
    left = checkpoint_files(checkpoint)
    assert left["two.safetensors"] is None
    found = recorded_files(packs, left)
    assert identity_of(found) == identity_of(whole)


def test_a_whole_checkpoint_needs_no_record(checkpoint, packs):
    files = checkpoint_files(checkpoint)
    assert recorded_files(packs, files) == files


@pytest.mark.parametrize("change", ["config", "index", "header_of_one", "record", "version"])
def test_a_record_that_disagrees_is_refused(checkpoint, packs, refused, change):
    path = write_record(packs, checkpoint_files(checkpoint))
    (checkpoint / "two.safetensors").unlink()
    if change == "header_of_one":
        replace_in(checkpoint / "one.safetensors", b'"U8"', b'"I8"')
    elif change == "record":
        path.write_bytes(path.read_bytes()[:-5])
    elif change == "version":
        replace_in(path, b'"version":1', b'"version":2')
    else:
        CHANGES[change](checkpoint)
    with refused(PackErrorKind.CHECKPOINT) as caught:
        recorded_files(packs, checkpoint_files(checkpoint))
    assert "two.safetensors" in str(caught.value)


def test_the_record_of_the_right_checkpoint_is_found_among_others(checkpoint, packs):
    whole = checkpoint_files(checkpoint)
    write_record(packs, whole)
    write_record(packs, {**whole, "config.json": "00" * 32})
    write_record(packs, {**whole, "two.safetensors": None} | {"two.safetensors": "11" * 32})
    (checkpoint / "one.safetensors").unlink()
    assert recorded_files(packs, checkpoint_files(checkpoint)) == whole


def test_an_identity_needs_every_file(checkpoint):
    (checkpoint / "two.safetensors").unlink()
    with pytest.raises(ValueError, match=r"two\.safetensors has no digest"):
        identity_of(checkpoint_files(checkpoint))


def test_ranks_may_keep_the_same_record_at_once(checkpoint, packs):
    files = checkpoint_files(checkpoint)
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: write_record(packs, files), range(64)))
    assert set(paths) == set(packs.iterdir())


def test_processes_write_their_own_drafts(checkpoint, packs):
    files = checkpoint_files(checkpoint)
    code = """
import sys
from pathlib import Path
from moet_store.identity import checkpoint_files, write_record
checkpoint, packs = map(Path, sys.argv[1:])
for _ in range(50):
    write_record(packs, checkpoint_files(checkpoint)).unlink(missing_ok=True)
write_record(packs, checkpoint_files(checkpoint))
"""
    command = [sys.executable, "-c", code, str(checkpoint), str(packs)]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    failures = [process.communicate()[1] for process in running]
    assert failures == ["", "", ""]
    assert recorded_files(packs, {**files, "two.safetensors": None}) == files
