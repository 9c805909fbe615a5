"""Staging: tensors arrive in any order, become the golden row, and are freed at once."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from moet_core import row as golden
from moet_core.errors import TensorError
from moet_core.row import row_layout
from moet_core.sources import FloatSource, Fp8Source, Mxfp4Source, Nvfp4Source, to_float64
from moet_vllm.formats import FLOAT, MXFP4, NVFP4, ExpertFormat, exact_codec
from moet_vllm.staging import MATRICES, ExpertStaging, PoolRows
from moet_vllm.synthetic import _quantise, _Random

FP8 = ExpertFormat("fp8", ("weight", "weight_scale_inv"), block=(128, 128))
FORMATS = {"bf16": FLOAT, "fp8": FP8, "mxfp4": MXFP4, "nvfp4": NVFP4}
HIDDEN, INTERMEDIATE, EXPERTS = 128, 64, 3
LAYER = "model.layers.1.mlp.experts"

Tensors = dict[tuple[int, str, str], torch.Tensor]


def checkpoint(source: str) -> Tensors:
    """Every tensor of three experts, by (expert, shard, suffix)."""
    tensors: Tensors = {}
    rand = _Random(0)
    for expert in range(EXPERTS):
        for shard, matrix in MATRICES.items():
            shape = (HIDDEN, INTERMEDIATE) if shard == "w2" else (INTERMEDIATE, HIDDEN)
            weight = rand(f"{expert}.{matrix}", *shape, std=0.1)
            for suffix, tensor in _quantise(matrix, weight, source).items():
                tensors[expert, shard, suffix] = tensor
    return tensors


def staging(source: str, rank: int = 0, size: int = 1, codec: str = "w2") -> ExpertStaging:
    layout = row_layout(codec, HIDDEN, INTERMEDIATE // size)
    pool = torch.full((EXPERTS, layout.row_bytes), 0xAA, dtype=torch.uint8)
    return ExpertStaging(
        LAYER, FORMATS[source], layout, PoolRows(pool), zeros="auto", tp_rank=rank, tp_size=size
    )


def load(stage: ExpertStaging, tensors: Tensors, order: Iterator[tuple[int, str, str]]) -> None:
    for expert, shard, suffix in order:
        prefix = "w2" if shard == "w2" else "w13"
        name = f"{LAYER}.{prefix}_{suffix}"
        stage.load(name, shard, expert, tensors[expert, shard, suffix])


def sources(source: str, tensors: Tensors, expert: int) -> list[Any]:
    """The gate, up and down matrix of an expert as the golden functions take them."""

    def matrix(shard: str) -> object:
        def get(suffix: str) -> object:
            tensor = tensors[expert, shard, suffix]
            bits = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
            return bits.numpy()

        if source == "bf16":
            bits = tensors[expert, shard, "weight"].view(torch.int16).numpy().view("uint16")
            return FloatSource(shard, bits, bf16=True)
        if source == "fp8":
            return Fp8Source(shard, get("weight"), get("weight_scale_inv"), (128, 128))
        if source == "mxfp4":
            return Mxfp4Source(shard, get("weight"), get("weight_scale"))
        return Nvfp4Source(shard, get("weight"), get("weight_scale"), get("weight_scale_2"))

    return [matrix(shard) for shard in MATRICES]


def golden_row(source: str, tensors: Tensors, expert: int, rank: int, size: int) -> bytes:
    matrices = sources(source, tensors, expert)
    return golden.encode_expert("w2", *matrices, rank=rank, size=size).tobytes()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("source", FORMATS)
def test_rows_equal_the_golden_rows_in_any_order_of_arrival(source: str, size: int) -> None:
    tensors = checkpoint(source)
    order = list(tensors)
    random.Random(1).shuffle(order)
    for rank in range(size):
        stage = staging(source, rank, size)
        load(stage, tensors, iter(order))
        stage.finish()
        for expert in range(EXPERTS):
            wanted = golden_row(source, tensors, expert, rank, size)
            assert bytes(stage.target.all_rows()[expert].numpy()) == wanted, (
                f"expert {expert}, rank {rank}"
            )


@pytest.mark.parametrize(("source", "codec"), [("mxfp4", "fp4-mx"), ("nvfp4", "fp4-nv")])
def test_rows_of_an_exact_codec_hold_the_checkpoints_values(source: str, codec: str) -> None:
    assert exact_codec(FORMATS[source]) == codec
    tensors = checkpoint(source)
    stage = staging(source, codec=codec)
    load(stage, tensors, iter(tensors))
    stage.finish()
    for expert in range(EXPERTS):
        row = stage.target.all_rows()[expert].numpy()
        w13, w2 = golden.decode_row(stage.layout, row)
        gate, up, down = (to_float64(matrix) for matrix in sources(source, tensors, expert))
        assert np.array_equal(w13, np.concatenate([gate, up])), f"expert {expert}"
        assert np.array_equal(w2, down), f"expert {expert}"


def test_one_expert_at_a_time_is_held_where_they_come_one_after_the_other() -> None:
    tensors = checkpoint("nvfp4")
    stage = staging("nvfp4")
    load(stage, tensors, iter(tensors))
    one = sum(
        tensor.nbytes
        for (expert, _, suffix), tensor in tensors.items()
        if expert == 0 and suffix in NVFP4.needed
    )
    assert stage.finish().peak_staged_bytes == one


def test_figures_are_those_of_the_tensors() -> None:
    tensors = checkpoint("nvfp4")
    stage = staging("nvfp4")
    load(stage, tensors, iter(tensors))
    figures = stage.finish()
    weights = EXPERTS * 3 * HIDDEN * INTERMEDIATE
    assert (figures.experts, figures.tensors, figures.weights) == (EXPERTS, EXPERTS * 3, weights)
    assert figures.bytes_before == weights * 9 // 16 + EXPERTS * 3 * 4
    assert figures.bytes_after == weights * 9 // 32
    assert figures.bits_per_weight == 2.25


def test_a_missing_tensor_is_named() -> None:
    tensors = checkpoint("nvfp4")
    del tensors[2, "w3", "weight_scale_2"]
    stage = staging("nvfp4")
    load(stage, tensors, iter(tensors))
    with pytest.raises(TensorError, match=r"experts\.2\.up_proj\.weight_scale_2") as error:
        stage.finish()
    assert "2 complete experts" in str(error.value)


def test_no_tensor_at_all_is_an_error() -> None:
    with pytest.raises(TensorError, match=r"experts\.0\.gate_proj\.weight"):
        staging("bf16").finish()


def test_a_tensor_that_comes_twice_is_an_error() -> None:
    tensors = checkpoint("mxfp4")
    stage = staging("mxfp4")
    first = next(iter(tensors))
    load(stage, tensors, iter([first]))
    with pytest.raises(TensorError, match="a second one"):
        load(stage, tensors, iter([first]))


def test_a_tensor_for_a_converted_expert_is_an_error() -> None:
    tensors = checkpoint("mxfp4")
    stage = staging("mxfp4")
    load(stage, tensors, iter(tensors))
    with pytest.raises(TensorError, match="restart"):
        load(stage, tensors, iter([(0, "w1", "weight")]))


def test_a_bad_value_is_named_with_its_checkpoint_tensor() -> None:
    tensors = checkpoint("mxfp4")
    tensors[0, "w2", "weight_scale"][3, 1] = 0xFF
    with pytest.raises(TensorError, match=r"experts\.0\.down_proj"):
        load(staging("mxfp4"), tensors, iter(tensors))


def test_a_scale_that_overflows_bf16_is_refused() -> None:
    tensors = checkpoint("mxfp4")
    tensors[1, "w1", "weight_scale"][0, 0] = 253
    with pytest.raises(TensorError, match="253"):
        load(staging("mxfp4"), tensors, iter(tensors))


@pytest.mark.parametrize("codec", ["w2", "fp4-mx", "fp4-nv"])
def test_random_rows_have_moderate_weights(codec: str) -> None:
    stage = staging("nvfp4", codec=codec)
    stage.fill_random()
    assert stage.finish().experts == EXPERTS
    for row in stage.target.all_rows():
        for weights in golden.decode_row(stage.layout, row.numpy()):
            spread = float(weights.std())
            assert 2**-11 < spread < 2**-7, f"{codec}: wanted about 2**-9, got {spread}"
