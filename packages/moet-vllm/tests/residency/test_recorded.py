"""Passes whose routing is recorded row by row, as those of CUDA graphs are, with padding behind."""

import numpy as np
import pytest
import torch
from small_model import EXPERTS, MODEL_LAYERS, TOP_K, SmallModel, tokens

from moet_core.gate import Gate, GateSettings
from moet_vllm.residency.pool import SlotPool
from moet_vllm.residency.resident import RECORDED

LAYERS = len(MODEL_LAYERS)
ALL = LAYERS * EXPERTS


def slot_pool(recorded):
    return SlotPool(
        slots=4,
        ring=0,
        row_bytes=16,
        layers=3,
        experts=5,
        device=torch.device("cpu"),
        recorded=recorded,
        top_k=2,
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_marks_are_those_of_the_tokens_alone(dtype):
    pool = slot_pool(8)
    for count in (1, 3, 2):
        pool.clear_wanted(count)
        wanted = np.zeros((3, 5), bool)
        for layer in range(3):
            ids = torch.tensor([[(count + row + layer) % 5, (row * layer) % 5] for row in range(4)])
            pool.record(layer, ids.to(dtype))
            wanted[layer, ids[:count].flatten()] = True
        assert (pool.take_wanted() == wanted).all()


def test_layers_without_a_record_mark_nothing():
    pool = slot_pool(8)
    pool.clear_wanted(2)
    pool.record(1, torch.tensor([[0, 4], [2, 4]]))
    assert np.argwhere(pool.take_wanted()).tolist() == [[1, 0], [1, 2], [1, 4]]
    pool.clear_wanted(2)
    assert not pool.take_wanted().any(), "the record of the pass before"


def test_records_add_to_what_kernels_mark():
    pool = slot_pool(8)
    pool.clear_wanted(1)
    pool.wanted[2, 3] = 1
    pool.record(0, torch.tensor([[1, 1]]))
    assert np.argwhere(pool.take_wanted()).tolist() == [[0, 1], [2, 3]]


def test_more_tokens_than_are_recorded_are_the_kernels_to_mark():
    pool = slot_pool(2)
    pool.clear_wanted(3)
    pool.wanted[0, 0] = 1
    assert np.argwhere(pool.take_wanted()).tolist() == [[0, 0]]


@pytest.fixture(scope="module")
def model():
    return SmallModel()


def padded_step(model, resident, x, read=None):
    """Run a step whose pass has rows behind the tokens; return those of the tokens."""
    rows = torch.cat((x, tokens(3, seed=99)))
    inputs = rows.clone()
    output = resident.step(
        lambda: model.forward(inputs, resident.run_layer),
        len(x),
        lambda: inputs.copy_(rows),
        read=read,
    )
    return output[: len(x)]


def resident_of(model, slots, **use):
    return model.resident(slots, model.pinned(), padded=RECORDED, **use)


def test_padding_brings_nobody_and_changes_no_bits(model):
    plain, padded = model.resident(ALL - 1, model.pinned()), resident_of(model, ALL - 1)
    for seed in range(20):
        x = tokens(1 + seed % 2, seed)
        got = padded_step(model, padded, x)
        assert torch.equal(got, model.alone(x))
        assert torch.equal(model.step(plain, x), got)
        assert (padded._wanted == plain._wanted).all()
        assert padded.counts.brought == plain.counts.brought
        padded.check_integrity()
    assert padded.counts.missed > 0
    assert padded.counts.streamed == 0
    assert padded.counts.repaired > 0


def test_a_gate_promotes_nobody_for_padding(model):
    promoted = []
    for padded in (0, RECORDED):
        gate = Gate(GateSettings(tau=1.0, passes=0))
        fine = model.fine_tier(ALL, model.pinned(fine=True), gate=gate)
        resident = model.resident(ALL, model.pinned(), fine=fine, padded=padded)
        step = padded_step if padded else model_step
        for seed in range(6):
            x = tokens(2, seed)
            step(model, resident, x, lambda output: model.read(output[:2]))
        promoted.append(gate.counts.promoted)
    assert promoted[0] == promoted[1] > 0


def model_step(model, resident, x, read):
    inputs = x.clone()
    resident.step(
        lambda: model.forward(inputs, resident.run_layer),
        len(x),
        lambda: inputs.copy_(x),
        read=read,
    )


def test_a_pool_that_never_misses_runs_the_experts_alone(model, monkeypatch):
    resident = resident_of(model, ALL)
    resident.preload([(layer, e) for layer in MODEL_LAYERS for e in range(EXPERTS)])

    def refused(*args):
        raise AssertionError("nobody looks at what the passes are routed to")

    monkeypatch.setattr(resident.pool, "record", refused)
    monkeypatch.setattr(resident._padding, "without", refused)
    x = tokens(2, 0)
    assert torch.equal(padded_step(model, resident, x), model.alone(x))
    many = tokens(RECORDED + 1, 1)
    assert torch.equal(model.step(resident, many), model.alone(many))
    assert resident.counts.passes == 2


def test_top_k_of_the_records_is_the_models(model):
    assert resident_of(model, ALL).pool._records.shape == (RECORDED, LAYERS, TOP_K)
