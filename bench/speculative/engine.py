"""One engine in a process of its own: greedy answers, counters of drafts, choices on given text.

`run(Job(...))` starts it and returns its `Answers`.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from moet_vllm.config import SCHEDULER, WORKER

__all__ = ["Answer", "Answers", "Job", "run"]

_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # Requests must be handed over all at once: what a step holds decides its rounding.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Sums split over threads round by how many rows there are, and a verified step has more.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is to do.

    Attributes:
        model: folder of the checkpoint.
        moet: the plugin's settings.
        drafts: speculative tokens, 0 for none.
        budget: most tokens in one step.
        prompts: token ids.
        tokens: how many to generate for each prompt, end-of-text ignored.
        turns: how often; each turn's prompts are those before with three quarters of their answers.
        streams: requests at a time.
        texts: token ids of texts to read, one at a time, for what model and drafter choose there.
    """

    model: str
    moet: dict[str, Any]
    drafts: int
    budget: int
    prompts: list[list[int]] = []
    tokens: int = 64
    turns: int = 1
    streams: int = 8
    texts: list[list[int]] = []


class Answer(msgspec.Struct, frozen=True):
    """A prompt's answer: tokens, and for each the log probabilities of the best, by token id."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[dict[str, float]]


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine did.

    Attributes:
        answers: of all turns, one after the other.
        seconds: that each lot of `streams` requests took.
        cached: prompt tokens that were found in the prefix cache.
        steps: drafts that were verified, one a request and step.
        accepted: of these, how many were right at each position.
        choices: for each text, the model's choice for every following token.
        drafts: for each text, the drafter's for the token after that.
        counts: what pool and gate counted, by name; empty without a pool.
    """

    answers: list[Answer]
    seconds: list[float]
    cached: int
    steps: int
    accepted: list[int]
    choices: list[list[int]]
    drafts: list[list[int]]
    counts: dict[str, float] = {}


def run(job: Job) -> Answers:
    """Run a job in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "job.json", Path(folder) / "answers.json"
        given.write_bytes(msgspec.json.encode(job))
        command = [sys.executable, __file__, str(given), str(found)]
        subprocess.run(command, check=True, env={**os.environ, **_ENVIRONMENT})
        return msgspec.json.decode(found.read_bytes(), type=Answers)


def _make(job: Job) -> Any:
    from vllm import LLM

    settings: dict[str, Any] = {}
    if {"pool", "fine"} & set(job.moet):
        settings["scheduler_cls"] = SCHEDULER
    if job.drafts:
        settings["speculative_config"] = {"method": "mtp", "num_speculative_tokens": job.drafts}
    return LLM(
        job.model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=2304,
        max_num_seqs=8,
        max_num_batched_tokens=job.budget,
        enable_prefix_caching=True,
        block_size=32,
        disable_log_stats=False,
        seed=0,
        additional_config={"moet": job.moet},
        worker_cls=WORKER,
        **settings,
    )


def _generate(llm: Any, job: Job) -> tuple[list[Answer], list[float]]:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=job.tokens, min_tokens=job.tokens, logprobs=5)
    found: list[Answer] = []
    seconds: list[float] = []
    prompts = job.prompts
    for _ in range(job.turns):
        turn = []
        for first in range(0, len(prompts), job.streams):
            batch = prompts[first : first + job.streams]
            given = [{"prompt_token_ids": prompt} for prompt in batch]
            started = time.perf_counter()
            requests = llm.generate(given, greedy, use_tqdm=False)
            seconds.append(time.perf_counter() - started)
            for prompt, request in zip(batch, requests, strict=True):
                (output,) = request.outputs
                best = [{str(t): e.logprob for t, e in at.items()} for at in output.logprobs]
                turn.append(Answer(prompt, list(output.token_ids), best))
        prompts = [answer.prompt + answer.tokens[: 3 * job.tokens // 4] for answer in turn]
        found += turn
    return found, seconds


def _watch(worker: Any) -> None:
    """Keep every choice that model and drafter make in the next passes."""
    runner = worker.model_runner
    worker.choices, worker.drafts = [], []
    _keep_choices(runner.model, worker.choices)
    _keep_choices(runner.drafter.model, worker.drafts)


def _keep_choices(model: Any, kept: list[list[int]]) -> None:
    forward = model.forward

    def keeping(*args: Any, **kwargs: Any) -> Any:
        hidden = forward(*args, **kwargs)
        kept.append(model.compute_logits(hidden).argmax(-1).tolist())
        return hidden

    model.forward = keeping


def _worker(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def _counts(worker: Any) -> dict[str, float]:
    """Return what a worker's pool and gate counted so far."""
    resident = worker.resident
    if resident is None:
        return {}
    found = dict(msgspec.to_builtins(resident.counts))
    if resident.fine is not None and resident.fine.gate is not None:
        gate = msgspec.to_builtins(resident.fine.gate.counts)
        found |= {name: gate[name] for name in ("checked", "fires")}
    return found


def _read(llm: Any, job: Job) -> tuple[list[list[int]], list[list[int]]]:
    from vllm import SamplingParams

    if not job.texts:
        return [], []
    worker = _worker(llm)
    _watch(worker)
    choices, drafts = [], []
    for text in job.texts:
        llm.reset_prefix_cache()
        worker.choices.clear()
        worker.drafts.clear()
        one = SamplingParams(temperature=0, max_tokens=1)
        llm.generate([{"prompt_token_ids": text}], one, use_tqdm=False)
        choices.append(worker.choices[0])
        drafts.append(worker.drafts[0])
    return choices, drafts


def _main() -> None:
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)
    llm = _make(job)
    if job.prompts:
        from vllm import SamplingParams

        llm.generate("warm up", SamplingParams(max_tokens=2), use_tqdm=False)
    before = {metric.name: metric for metric in llm.get_metrics()}
    answers, seconds = _generate(llm, job)
    after = {metric.name: metric for metric in llm.get_metrics()}
    steps = "vllm:spec_decode_num_drafts"
    positions = "vllm:spec_decode_num_accepted_tokens_per_pos"
    hits = "vllm:prefix_cache_hits"
    choices, drafts = _read(llm, job)
    found = Answers(
        answers=answers,
        seconds=seconds,
        cached=int(after[hits].value - before[hits].value),
        steps=int(after[steps].value - before[steps].value) if job.drafts else 0,
        accepted=[
            b - a for a, b in zip(before[positions].values, after[positions].values, strict=True)
        ]
        if job.drafts
        else [],
        choices=choices,
        drafts=drafts,
        counts=_counts(_worker(llm)),
    )
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    _main()
