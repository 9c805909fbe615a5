"""Layers that route by token id: their experts are there before the pass that wants them."""

import numpy as np
import pytest
import torch
from small_model import EXPERTS, MODEL_LAYERS, TOP_K, SmallModel, tokens
from torch import nn

from moet_vllm.residency.token_routing import TokenRouting, token_tables

VOCABULARY = 12


@pytest.fixture(scope="module")
def tables():
    rng = np.random.default_rng(0)
    rows = [rng.permuted(np.arange(EXPERTS))[:TOP_K] for _ in range(2 * VOCABULARY)]
    both = np.array(rows).reshape(2, VOCABULARY, TOP_K)
    return {0: both[0], 1: both[1]}


class HashedModel(SmallModel):
    """Its first layers take the experts of the token ids, whatever the router says."""

    def __init__(self, tables):
        super().__init__()
        self.tables = tables
        self.ids = np.empty(0, np.int64)

    def forward(self, x, run_layer):
        def routed(number, x, weights, ids, limit):
            if number in self.tables:
                ids = torch.from_numpy(self.tables[number][self.ids])
            return run_layer(number, x, weights, ids, limit)

        return super().forward(x, routed)

    def serve(self, resident, x, certain):
        inputs = x.clone()
        return resident.step(
            lambda: self.forward(inputs, resident.run_layer),
            len(x),
            lambda: inputs.copy_(x),
            certain=certain,
        )


def test_keys_are_those_of_every_token_once(tables):
    got = TokenRouting(tables).keys(np.array([3, 3, 7]))
    wanted = {(layer, e) for layer in (0, 1) for t in (3, 7) for e in tables[layer][t].tolist()}
    assert got == sorted(wanted)
    assert TokenRouting(tables)
    assert not TokenRouting({})


@pytest.mark.parametrize(("knows", "passes", "repaired"), [(True, 1, 0), (False, 2, 1)])
def test_what_is_certain_is_brought_before_the_first_pass(tables, knows, passes, repaired):
    model, routing = HashedModel(tables), TokenRouting(tables)
    model.ids = np.array([4, 9])
    resident = model.resident(len(MODEL_LAYERS) * EXPERTS, model.pinned())
    others = [layer for number, layer in enumerate(MODEL_LAYERS) if number not in tables]
    resident.preload([(layer, expert) for layer in others for expert in range(EXPERTS)])
    x, keys = tokens(2, 0), routing.keys(model.ids)
    got, wanted = model.serve(resident, x, (lambda: keys) if knows else None), model.alone(x)
    assert torch.equal(got, wanted), f"largest difference {(got - wanted).abs().max()}"
    resident.check_integrity()
    counts = resident.counts
    assert (counts.passes, counts.repaired) == (passes, repaired)
    assert counts.missed == counts.brought == len(keys)


def test_a_pool_that_cannot_hold_what_is_certain_serves_all_the_same(tables):
    model = HashedModel(tables)
    resident = model.resident(EXPERTS, model.pinned())
    model.ids = np.array([1])
    every = [(layer, expert) for layer in range(len(MODEL_LAYERS)) for expert in range(EXPERTS)]
    x = tokens(1, 0)
    assert torch.equal(model.serve(resident, x, lambda: every), model.alone(x))
    assert resident.failure is None
    resident.check_integrity()


def test_tables_are_found_in_the_gates_of_this_ranks_layers():
    model = nn.Module()
    for index in (1, 2, 3, 5):
        gate = nn.Module()
        gate.tid2eid = None
        if index != 3:
            table = torch.full((VOCABULARY, TOP_K), index, dtype=torch.int32)
            gate.tid2eid = nn.Parameter(table, requires_grad=False)
        model.add_module(f"layer_{index}", gate)
    found = token_tables(model, MODEL_LAYERS, lambda name: int(name.split("_")[1]))
    assert {number: int(table[0, 0]) for number, table in found.items()} == {0: 1, 1: 2, 3: 5}
