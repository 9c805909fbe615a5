"""Making resident experts while a model loads: from a checkpoint, from packs, and not at all."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import EXPERTS, INTERMEDIATE, LAYOUT, MODEL_LAYERS, TOP_K, SmallModel, tokens

from moet_core.errors import ConfigError
from moet_core.row import row_layout
from moet_store import PackError, find_packs
from moet_vllm.config import parse_config
from moet_vllm.residency import op
from moet_vllm.residency.build import (
    Rank,
    ResidencyBuild,
    building,
    current_build,
    pool_shape,
)
from moet_vllm.residency.stores import PackStore, PinnedStore

ALL = len(MODEL_LAYERS) * EXPERTS
GIB = 2**30
ROW = LAYOUT.row_bytes


def name_of(layer: int) -> str:
    return f"model.layers.{layer}.mlp.experts"


@pytest.fixture(scope="module")
def model() -> SmallModel:
    return SmallModel()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    header = json.dumps({}).encode()
    for shard in ("a.safetensors", "b.safetensors"):
        (folder / shard).write_bytes(struct.pack("<Q", len(header)) + header)
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def begin(checkpoint: Path | None, rank: int = 0, size: int = 1, **moet: Any) -> ResidencyBuild:
    about = Rank(tp_rank=rank, tp_size=size, device=torch.device("cpu"), checkpoint=checkpoint)
    return ResidencyBuild(parse_config(moet), about)


def load(build: ResidencyBuild, model: SmallModel) -> list[int]:
    """Load the model as vLLM does: all layers are made, then filled; return those converted."""
    rows = [build.add_layer(name_of(n), n, LAYOUT, EXPERTS, TOP_K) for n in model.layers]
    converted = []
    for number, target in enumerate(rows):
        if target.needed:
            for expert in range(EXPERTS):
                target.row(expert).copy_(model.rows[number, expert])
            target.complete()
            converted.append(model.layers[number])
    return converted


def check_serves(resident: Any, model: SmallModel) -> None:
    for seed in range(3):
        x = tokens(2, seed)
        assert torch.equal(model.step(resident, x), model.alone(x))
    resident.check_integrity()


HALF = {"pool": ALL // 2 * ROW / GIB}


@pytest.mark.parametrize(
    ("moet", "store"),
    [
        (HALF, PinnedStore),
        (HALF | {"packs": "{packs}"}, PackStore),
        (HALF | {"packs": "{packs}", "arena": 6 * ROW / GIB}, PackStore),
        (HALF | {"packs": "{packs}", "host_store": "pinned"}, PinnedStore),
        (HALF | {"packs": "{packs},{packs}2", "pack_reads": "cached"}, PackStore),
        ({"packs": "{packs}"}, PackStore),
    ],
)
def test_every_way_of_keeping_rows_serves_the_same(
    model: SmallModel, checkpoint: Path, tmp_path: Path, moet: dict[str, Any], store: type
) -> None:
    moet = {**moet}
    if "packs" in moet:
        moet["packs"] = moet["packs"].format(packs=tmp_path / "packs")
    for start in range(2):
        build = begin(checkpoint, **moet)
        converted = load(build, model)
        kept = start == 1 and "packs" in moet
        assert converted == ([] if kept else list(MODEL_LAYERS))
        resident = build.finish()
        assert resident is not None
        assert type(resident.store) is store
        check_serves(resident, model)
        op.unbind(resident)
        resident.close()


def test_a_start_that_was_interrupted_is_resumed_layer_by_layer(
    model: SmallModel, checkpoint: Path, tmp_path: Path
) -> None:
    moet = HALF | {"packs": str(tmp_path / "packs")}
    build = begin(checkpoint, **moet)
    targets = [build.add_layer(name_of(n), n, LAYOUT, EXPERTS, TOP_K) for n in MODEL_LAYERS]
    for number in (0, 2):
        targets[number].all_rows().copy_(model.rows[number])
        targets[number].complete()
    del build, targets
    again = begin(checkpoint, **moet)
    assert load(again, model) == [MODEL_LAYERS[1], MODEL_LAYERS[3]]
    resident = again.finish()
    assert resident is not None
    check_serves(resident, model)
    op.unbind(resident)
    resident.close()


def test_packs_of_another_rank_checkpoint_or_zeros_are_not_taken(
    model: SmallModel, checkpoint: Path, tmp_path: Path
) -> None:
    packs = tmp_path / "packs"
    moet = HALF | {"packs": str(packs)}
    assert load(begin(checkpoint, **moet), model) == list(MODEL_LAYERS)
    assert len(find_packs(packs)) == 1
    assert load(begin(checkpoint, rank=1, size=2, **moet), model) == list(MODEL_LAYERS)
    assert load(begin(checkpoint, zeros="alternate", **moet), model) == list(MODEL_LAYERS)
    (checkpoint / "config.json").write_text('{"other": 1}')
    assert load(begin(checkpoint, **moet), model) == list(MODEL_LAYERS)
    assert len(find_packs(packs)) == 4


def test_a_shard_that_was_deleted_is_not_missed_once_packs_hold_it(
    model: SmallModel, checkpoint: Path, tmp_path: Path
) -> None:
    moet = HALF | {"packs": str(tmp_path / "packs")}
    (checkpoint / "b.safetensors").rename(tmp_path / "b.safetensors")
    with pytest.raises(PackError, match=r"b\.safetensors is not there"):
        load(begin(checkpoint, **moet), model)
    (tmp_path / "b.safetensors").rename(checkpoint / "b.safetensors")
    load(begin(checkpoint, **moet), model)
    (checkpoint / "b.safetensors").unlink()
    build = begin(checkpoint, **moet)
    assert load(build, model) == []


def test_a_layer_is_held_in_memory_only_until_it_is_complete(
    model: SmallModel, checkpoint: Path, tmp_path: Path
) -> None:
    build = begin(checkpoint, **HALF, packs=str(tmp_path / "packs"))
    target = build.add_layer(name_of(1), 1, LAYOUT, EXPERTS, TOP_K)
    target.all_rows().copy_(model.rows[0])
    assert target.all_rows().data_ptr() == target.all_rows().data_ptr()
    target.complete()
    assert not target._rows


def test_random_weights_cannot_be_packed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="packs needs the experts of a checkpoint"):
        begin(None, packs=str(tmp_path))


def test_layers_of_two_shapes_share_no_pool(checkpoint: Path) -> None:
    build = begin(checkpoint, **HALF)
    build.add_layer(name_of(1), 1, LAYOUT, EXPERTS, TOP_K)
    other = row_layout("w2", LAYOUT.hidden, 2 * INTERMEDIATE)
    with pytest.raises(ConfigError, match=r"layers\.2\.mlp\.experts has other experts"):
        build.add_layer(name_of(2), 2, other, EXPERTS, TOP_K)


def test_an_arena_below_one_row_is_refused(
    model: SmallModel, checkpoint: Path, tmp_path: Path
) -> None:
    build = begin(checkpoint, **HALF, packs=str(tmp_path / "packs"), arena=(ROW - 1) / GIB)
    load(build, model)
    with pytest.raises(ConfigError, match="one expert of this model takes"):
        build.finish()


def test_a_rank_without_routed_experts_has_no_pool(checkpoint: Path) -> None:
    assert begin(checkpoint, **HALF).finish() is None


def test_layers_announce_themselves_inside_the_block_only(checkpoint: Path) -> None:
    build = begin(checkpoint, **HALF)
    assert current_build() is None
    with building(build):
        assert current_build() is build
    assert current_build() is None


class TestPoolShape:
    def shape(self, slots: float | str) -> Any:
        pool = slots if isinstance(slots, str) else slots * ROW / GIB
        return pool_shape("pool", pool, MODEL_LAYERS, EXPERTS, TOP_K, LAYOUT)

    def test_all_experts_need_no_ring(self) -> None:
        for slots in ("all", ALL, ALL + 7.5):
            shape = self.shape(slots)
            assert (shape.slots, shape.ring, shape.coverage) == (ALL, 0, 1.0)

    @pytest.mark.parametrize("slots", [EXPERTS, EXPERTS + 0.9, ALL / 2, ALL - 1])
    def test_slots_and_ring_are_the_pool(self, slots: float) -> None:
        shape = self.shape(slots)
        assert shape.slots + shape.ring == int(slots)
        assert shape.ring >= 2
        assert shape.ring % 2 == 0
        assert shape.slots > shape.ring

    def test_less_than_a_layer_is_refused_with_what_would_do(self) -> None:
        needed = f"{EXPERTS * ROW / GIB:.4f}"
        with pytest.raises(ConfigError, match=f"at least one layer of 8 \\({needed} GiB\\)"):
            self.shape(EXPERTS - 1)

    def test_the_working_set_counts_each_layer_once(self) -> None:
        shape = self.shape(ALL / 2)
        assert shape.working_set(1) == len(MODEL_LAYERS) * TOP_K
        assert shape.working_set(1000) == ALL
