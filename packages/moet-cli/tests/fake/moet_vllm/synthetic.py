"""Writes the smallest folder that is a complete checkpoint."""

import json
import struct


def write_checkpoint(folder, *, source="nvfp4", seed=0):
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = {"metadata": {"total_size": 8}, "weight_map": {}}
    for number, shard in enumerate(shards):
        name = f"w{number}"
        index["weight_map"][name] = shard
        header = {name: {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}
        text = json.dumps(header).encode()
        (folder / shard).write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
