import json
import struct

import pytest

from moet_core import checkpoint
from moet_core.checkpoint import check_checkpoint, read_header
from moet_core.errors import ConfigError, TensorError

SIZES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F32": 4}


def shard_bytes(tensors):
    """Return a safetensors file of name -> (dtype, number of elements)."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, count) in tensors.items():
        begin, end = end, end + count * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": [count], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def write(folder, shards, index=True):
    (folder / "config.json").write_text('{"model_type": "glm4_moe"}')
    for name, tensors in shards.items():
        (folder / name).write_bytes(shard_bytes(tensors))
    if index:
        weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)
    return folder


TWO_SHARDS = {
    "model-00001-of-00002.safetensors": {"a.weight": ("BF16", 3)},
    "model-00002-of-00002.safetensors": {"b.weight": ("F32", 2), "b.bias": ("U8", 1)},
}


@pytest.mark.parametrize("index", [True, False])
def test_a_complete_checkpoint(tmp_path, index):
    info = check_checkpoint(write(tmp_path, TWO_SHARDS, index))
    assert info.tensors == 3
    assert info.total_bytes == 6 + 8 + 1
    assert info.shards == tuple(TWO_SHARDS)


@pytest.mark.parametrize("index", [True, False])
def test_a_shard_may_be_absent_where_the_caller_says_so(tmp_path, index):
    first, second = TWO_SHARDS
    (write(tmp_path, TWO_SHARDS, index) / first).unlink()
    info = check_checkpoint(tmp_path, absent=[first])
    assert (info.tensors, info.shards) == (2, (second,))
    with pytest.raises(ConfigError, match=f"{first} is missing"):
        check_checkpoint(tmp_path, absent=[second])


def test_a_shard_that_may_be_absent_is_checked_where_it_is_there(tmp_path):
    first, _ = TWO_SHARDS
    file = write(tmp_path, TWO_SHARDS) / first
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="truncated"):
        check_checkpoint(tmp_path, absent=[first])


def test_a_path_may_be_a_string(tmp_path):
    assert check_checkpoint(str(write(tmp_path, TWO_SHARDS))).tensors == 3


def test_one_file_needs_no_index(tmp_path):
    info = check_checkpoint(write(tmp_path, {"model.safetensors": {"a": ("U8", 5)}}, index=False))
    assert info.shards == ("model.safetensors",)


def test_a_file_may_hold_no_tensors(tmp_path):
    assert check_checkpoint(write(tmp_path, {"model.safetensors": {}})).tensors == 0


def test_a_header_of_known_bytes(tmp_path):
    text = b'{"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
    file = tmp_path / "x.safetensors"
    file.write_bytes(b"\x35\0\0\0\0\0\0\0" + text + b"\1\2")
    assert read_header(file)["x"].data_offsets == (0, 2)


def test_a_header_may_be_padded_with_spaces(tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", 6) + b"{}    ")
    assert read_header(file) == {}


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard_is_named(tmp_path, index):
    write(tmp_path, TWO_SHARDS, index)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00001-of-00002\.safetensors is missing"):
        check_checkpoint(tmp_path)


@pytest.mark.parametrize(("change", "what"), [(-1, "truncated"), (1, "too long")])
def test_a_file_of_another_length_is_named_with_both(tmp_path, change, what):
    write(tmp_path, TWO_SHARDS)
    file = tmp_path / "model-00002-of-00002.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] if change < 0 else data + b"\0")
    message = f"{file.name} is {what}: wanted {len(data)} bytes, found {len(data) + change}"
    with pytest.raises(ConfigError, match=message):
        check_checkpoint(tmp_path)


@pytest.mark.parametrize("length", [0, 4, 8, 20])
def test_a_file_cut_inside_its_header_is_refused(tmp_path, length):
    write(tmp_path, TWO_SHARDS)
    file = tmp_path / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ConfigError, match=f"no complete safetensors file: it has {length} bytes"):
        check_checkpoint(tmp_path)


def test_a_huge_header_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MAX_HEADER_BYTES", 100)
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", 101) + b" " * 200)
    with pytest.raises(ConfigError, match="says that its header has 101"):
        read_header(file)


@pytest.mark.parametrize("text", [b"{{", b"[1]", b'{"x":{"dtype":"U8","shape":[1]}}'])
def test_a_header_that_is_no_header_is_refused(tmp_path, text):
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_header(file)


@pytest.mark.parametrize(
    ("shape", "offsets"), [([3], [0, 2]), ([2], [2, 0]), ([-1], [0, -1]), ([2], [-2, 0])]
)
def test_an_entry_that_contradicts_itself_is_named(tmp_path, shape, offsets):
    entry = {"dtype": "U8", "shape": shape, "data_offsets": offsets}
    text = json.dumps({"a.weight": entry}).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(TensorError, match=r"Tensor 'a.weight': wanted .* bytes for U8"):
        read_header(file)


def test_a_tensor_that_is_not_where_the_index_says_is_named(tmp_path):
    write(tmp_path, TWO_SHARDS)
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(file.read_text().replace('"b.bias"', '"c.bias"'))
    with pytest.raises(ConfigError, match=r"places tensor 'c\.bias' in model-00002"):
        check_checkpoint(tmp_path)


def test_an_index_must_not_lead_out_of_the_folder(tmp_path):
    write(tmp_path, TWO_SHARDS)
    file = tmp_path / "model.safetensors.index.json"
    file.write_text('{"weight_map": {"a": "../model.safetensors"}}')
    with pytest.raises(ConfigError, match="no plain file name"):
        check_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": {"a": 1}}'])
def test_an_index_that_cannot_be_read_is_named(tmp_path, text):
    write(tmp_path, TWO_SHARDS)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"index\.json cannot be read"):
        check_checkpoint(tmp_path)


def test_config_json_is_needed(tmp_path):
    write(tmp_path, TWO_SHARDS)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        check_checkpoint(tmp_path)


def test_a_folder_without_safetensors_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="Only safetensors checkpoints can be served"):
        check_checkpoint(tmp_path)


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ConfigError, match="There is no checkpoint folder"):
        check_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"weight": ("BF16", 4)}, "bf16"),
        ({"weight": ("F32", 4)}, "fp32"),
        ({"weight": ("F8_E4M3", 4), "weight_scale_inv": ("F32", 1)}, "fp8"),
        ({"weight": ("U8", 4), "weight_scale": ("F8_E4M3", 1)}, "nvfp4"),
        ({"weight": ("I8", 4), "scale": ("F8_E8M0", 1)}, "mxfp4"),
        ({"weight": ("U8", 4), "weight_scale": ("U8", 1)}, "mxfp4"),
        ({"weight": ("U8", 4)}, None),
        ({"bias": ("BF16", 4)}, None),
    ],
)
def test_the_experts_format_is_told_from_their_dtypes(tmp_path, tensors, expected):
    name = "model.layers.3.mlp.experts.7.up_proj"
    shard = {f"{name}.{kind}": entry for kind, entry in tensors.items()}
    shard["model.layers.3.mlp.gate.weight"] = ("F32", 1)
    assert check_checkpoint(write(tmp_path, {"model.safetensors": shard})).source_format == expected


def test_experts_of_several_formats_have_none(tmp_path):
    shard = {"a.experts.0.w1.weight": ("BF16", 1), "a.experts.1.w1.weight": ("F32", 1)}
    assert check_checkpoint(write(tmp_path, {"model.safetensors": shard})).source_format is None
