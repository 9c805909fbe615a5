"""The recorded routing is the router's, and steps follow prompts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from residency.record import CHUNK, record, requests, route, step_lengths
from tinymoe.model import TinyMoe
from tinymoe.shape import SMOKE
from tinymoe.tokenizer import read_tokenizer

from moet_vllm.tinymoe import CHECKPOINT, held_out


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return TinyMoe(replace(SMOKE, vocabulary=4096)).eval()


def test_each_token_s_experts_are_those_of_the_router(model):
    tokens = np.arange(10, 30)
    chosen = route(model, tokens)
    assert chosen.dtype == np.uint16
    assert chosen.shape == (20, 2, 2)  # two layers of the main stack have experts; no MTP layer
    loads = model(torch.from_numpy(tokens)[None])[2][:-1]
    for layer in range(2):
        counts = np.bincount(chosen[:, layer].ravel(), minlength=8)
        np.testing.assert_array_equal(counts, loads[layer])
    assert (np.diff(chosen.astype(int), axis=2) > 0).all()


def test_a_token_s_routing_depends_on_what_is_before_it_alone(model):
    tokens = np.arange(10, 40)
    np.testing.assert_array_equal(route(model, tokens)[:12], route(model, tokens[:12]))


def test_prompts_are_read_in_chunks_and_answers_token_by_token():
    steps = list(step_lengths(CHUNK + 8, CHUNK + 5))
    assert steps == [(CHUNK, True), (5, True), (1, False), (1, False)]


def test_requests_are_served_one_after_the_other(model):
    first, second = np.arange(5, 15), np.arange(40, 46)
    trace = record(model, [(first, 7), (second, 4)])
    assert trace.prefill.tolist() == [True, False, False, True, False]
    assert np.diff(trace.ends, prepend=0).tolist() == [7, 1, 1, 4, 1]
    wanted = np.concatenate([route(model, first)[:-1], route(model, second)[:-1]])
    np.testing.assert_array_equal(trace.chosen, wanted)


@pytest.mark.parametrize("kind", ["python", "prose", "tool_calls", "arithmetic", "chat"])
def test_prompts_end_where_answers_begin(kind):
    tokenizer = read_tokenizer(CHECKPOINT)
    found = requests(kind, tokenizer, held_out())
    assert found
    for tokens, prompt in found:
        assert 0 < prompt < len(tokens) - 1
        if kind not in ("python", "prose"):
            text = tokenizer.decode(tokens[:prompt].tolist(), skip_special_tokens=False)
            assert text.endswith("<|assistant|><think></think>")
