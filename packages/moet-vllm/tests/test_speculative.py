"""TinyMoE with its MTP layer drafting: the same tokens, and most drafts are accepted."""

from collections.abc import Callable
from typing import Any

import pytest
from engine_oracle import Comparison, compare
from tokenizers import Tokenizer

from moet_vllm import tinymoe
from moet_vllm.config import SCHEDULER, WORKER
from moet_vllm.events import MARKER

pytestmark = pytest.mark.engine

TOKENS = 48
HALF = 256 * 8192 / 2**30  # GiB of half of TinyMoE's 512 experts
POOL = {"worker_cls": WORKER, "scheduler_cls": SCHEDULER}
# A float32 product of few rows rounds unlike one of many; a verified step has more rows.
ROUNDING_NATS = 0.1

Run = Callable[..., dict[str, Any]]


def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(tinymoe.CHECKPOINT / "tokenizer.json"))
    texts = [text.text for text in tinymoe.held_out().texts if text.kind == "python"]
    encoded = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
    return [ids[:length] for ids, length in zip(encoded, (3, 17, 40, 100), strict=False)]


@pytest.fixture(scope="module")
def serve(run_engine: Run) -> Run:
    def run(
        drafts: int, moet: dict[str, Any], tensor_parallel: int = 1, tokens: int = TOKENS
    ) -> dict[str, Any]:
        engine: dict[str, Any] = {"disable_log_stats": False, "max_num_batched_tokens": 48}
        if drafts:
            engine["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
        if "pool" in moet:
            engine |= POOL
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            return run_engine(
                tinymoe.CHECKPOINT,
                moet=moet,
                prompts=prompts(),
                tokens=tokens,
                engine=engine,
                tensor_parallel=tensor_parallel,
            )

    return run


@pytest.fixture(scope="module")
def plain(serve: Run) -> Callable[[int], dict[str, Any]]:
    """Return a function that gives the answers without drafts at a tensor-parallel size."""
    known: dict[int, dict[str, Any]] = {}

    def answers(tensor_parallel: int) -> dict[str, Any]:
        if tensor_parallel not in known:
            known[tensor_parallel] = serve(0, {}, tensor_parallel)
        return known[tensor_parallel]

    return answers


@pytest.mark.parametrize(
    ("drafts", "moet", "tensor_parallel"),
    [(3, {}, 1), (1, {"pool": HALF}, 1), (2, {}, 2)],
    ids=["resident", "pool", "tensor parallel"],
)
def test_drafts_change_no_token_and_most_are_accepted(
    serve: Run,
    plain: Callable[[int], dict[str, Any]],
    comparisons: dict[str, Comparison],
    drafts: int,
    moet: dict[str, Any],
    tensor_parallel: int,
) -> None:
    wanted = plain(tensor_parallel)
    got = serve(drafts, moet, tensor_parallel)
    assert wanted["answers"] is not None, wanted["log"]
    assert got["answers"] is not None, got["log"]
    found = compare(wanted["answers"], got["answers"], ROUNDING_NATS)
    comparisons[f"k={drafts} against k=0, {moet}, tp{tensor_parallel}"] = found
    assert not found.faults, found.faults
    assert found.compared >= len(prompts()) * TOKENS // 2, f"too little is comparable: {found}"
    assert len(got["acceptance"]) == drafts
    assert got["acceptance"][0] > 0.6, f"wanted about 0.8 of first drafts, got {got['acceptance']}"
    converted = [line for line in got["log"].splitlines() if f'{MARKER}{{"event":"conv' in line]
    assert ['"layers":8,' in line for line in converted] == [True] * tensor_parallel, converted


def test_drafts_beside_a_gate_that_always_fires_give_what_fp4_experts_give(
    serve: Run, comparisons: dict[str, Comparison]
) -> None:
    gate = {"pool": HALF, "fine": HALF, "gate": "max_prob", "tau": 1.0, "gate_passes": 0}
    wanted, got = serve(0, {"experts": "fp4"}), serve(2, gate)
    assert got["answers"] is not None, got["log"]
    found = compare(wanted["answers"], got["answers"], ROUNDING_NATS)
    comparisons["k=2, gate at tau 1, against fp4 and k=0"] = found
    assert not found.faults, found.faults
    assert found.compared >= len(prompts()) * TOKENS // 2, f"too little is comparable: {found}"
    assert got["acceptance"][0] > 0.6, got["acceptance"]


def test_steps_without_drafts_between_those_with_change_no_token(
    serve: Run, comparisons: dict[str, Comparison]
) -> None:
    """Trials of what a token costs without drafts begin after 128 steps of decoding alone."""
    tokens = 320
    wanted = serve(0, {"pool": HALF}, tokens=tokens)
    got = serve(1, {"pool": HALF, "suspend_drafts": True}, tokens=tokens)
    assert got["answers"] is not None, got["log"]
    assert sorted(got["draft_cost"]) == ["drafts", "none"], got["draft_cost"]
    found = compare(wanted["answers"], got["answers"], ROUNDING_NATS)
    comparisons["k=1 with trials of none against k=0"] = found
    assert not found.faults, found.faults
    assert found.compared >= len(prompts()) * tokens // 2, f"too little is comparable: {found}"
    assert got["acceptance"][0] > 0.6, got["acceptance"]
