"""What an engine of a fleet can be told to do; each task returns what JSON holds.

They run in the engine's process: vLLM's engine core and worker live there too.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["TASKS", "about", "hash_logits"]

WARM = 8
"""Decode steps of a run that are not timed."""


def about(llm: Any) -> dict[str, Any]:
    """Describe an engine that is ready."""
    import torch
    from vllm.compilation.counter import compilation_counter

    found: dict[str, Any] = {
        "graphs": compilation_counter.num_cudagraph_captured,
        "shape": llm.collective_rpc(_pool_shape)[0],
    }
    if torch.cuda.is_available():
        found["gpu_bytes"] = torch.cuda.memory_reserved()
    return found


def answer(llm: Any, prompts: list[list[int]], tokens: int, streams: int) -> dict[str, Any]:
    """Serve prompts greedily, so many at a time; return tokens and hashes of all logits."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    found = []
    for first in range(0, len(prompts), streams):
        batch = [{"prompt_token_ids": prompt} for prompt in prompts[first : first + streams]]
        for request in llm.generate(batch, greedy, use_tqdm=False):
            found.append(list(request.outputs[0].token_ids))
    return {"tokens": found, "hashes": [h for h in llm.collective_rpc(take_hashes) if h]}


def hash_all(llm: Any, on: bool) -> None:
    """Keep the hash of every step's logits from now on, or no longer."""
    llm.collective_rpc(hash_logits if on else _stop_hashing)


def decode(
    llm: Any,
    streams: int,
    prompt: int,
    tokens: int,
    seed: int = 0,
    greedy: bool = False,
    begin: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Time decode steps.

    Tokens are sampled at temperature 1, so that a random model does not fall into a cycle, whose
    few experts any cache holds.

    Args:
        llm: The engine.
        streams: Requests at a time; all begin together, or within a few steps.
        prompt: Tokens of each prompt, random.
        tokens: Tokens of each answer; the first `WARM` are not timed.
        seed: Of the prompts.
        greedy: Take the most probable token instead.
        begin: Called when the first `WARM` tokens are there.

    Returns:
        `ms`, the time of each step, and what the pool and the gate counted in the timed steps.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    vocabulary = llm.model_config.get_vocab_size()
    ended = False
    temperature = 0.0 if greedy else 1.0
    sampling = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    names = [f"{number}-{time.monotonic_ns()}" for number in range(streams)]
    prompts = random_prompts(vocabulary, streams, prompt, seed)
    for name, ids in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": ids}, sampling)
    produced: dict[str, int] = {}
    times: list[float] = []
    before: dict[str, float] = {}
    try:
        while engine.has_unfinished_requests():
            outputs = engine.step()
            for output in outputs:
                produced[output.request_id] = len(output.outputs[0].token_ids)
                ended |= output.finished  # requests that began a step later run on alone
            is_whole = bool(outputs) and not ended and len(produced) == streams
            if is_whole and min(produced.values()) >= WARM:
                if not times:
                    before = counts(llm)
                    begin()
                times.append(time.perf_counter())
    except BaseException:
        engine.abort_request(names)  # the next task finds none of them
        raise
    after = counts(llm)
    return {
        "ms": [1000 * (b - a) for a, b in itertools.pairwise(times)],
        "counts": {key: after[key] - before.get(key, 0) for key in after},
    }


def prefill(llm: Any, tokens: int, seed: int = 0) -> dict[str, Any]:
    """Time one prompt of random tokens until its first answer token."""
    from vllm import SamplingParams

    before = counts(llm)
    (ids,) = random_prompts(llm.model_config.get_vocab_size(), 1, tokens, seed)
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    started = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    after = counts(llm)
    return {"seconds": seconds, "counts": {k: after[k] - before[k] for k in after}}


def counts(llm: Any) -> dict[str, float]:
    """Return what the pool and the gate have counted since the start; empty without a pool."""
    return dict(llm.collective_rpc(_counts)[0])


def check(llm: Any) -> dict[str, float]:
    """Check every table and byte of the pool; return its counts."""
    llm.collective_rpc(_check)
    return counts(llm)


def reopen(llm: Any, moet: dict[str, Any], forget: bool) -> dict[str, Any]:
    """Replace the pool by one with other settings; `forget` drops the hot sets beside packs."""
    if forget:
        forget_heat(llm, moet["packs"])
    llm.collective_rpc("reopen_pool", args=(moet,))
    return about(llm)


def save_heat(llm: Any) -> None:
    """Keep the hot set beside the packs."""
    llm.collective_rpc(_save_heat)


def hottest(llm: Any) -> list[list[int]]:
    """Return the experts in the pool, the most valuable first, as [model layer, expert]."""
    return [list(key) for key in llm.collective_rpc(_hottest)[0]]


def preload(llm: Any, keys: list[list[int]]) -> None:
    """Fill an empty pool with experts, as an engine does that starts with a hot set."""
    llm.collective_rpc(_preload, args=([tuple(key) for key in keys],))


def forget_heat(llm: Any, packs: str) -> None:
    """Delete the hot sets beside packs."""
    from pathlib import Path

    for path in Path(packs).glob("*.heat.json"):
        path.unlink()


def set_tau(llm: Any, tau: float) -> None:
    """Change the gate's threshold."""
    llm.collective_rpc(_set_tau, args=(tau,))


def confidences(llm: Any, streams: int, prompt: int, tokens: int, seed: int = 0) -> list[float]:
    """Return the least confidence of each gated step of a decode run."""
    llm.collective_rpc(_record_confidence)
    decode(llm, streams, prompt, tokens, seed)
    found: list[float] = llm.collective_rpc(_take_confidence)[0]
    return found


def usage(llm: Any, tokens: int, seed: int = 0) -> float:
    """Return the share of routings that the most used fifth of each layer's experts serve.

    Counted over single-stream decode steps, whose marks name every routing.
    """
    llm.collective_rpc(_record_usage)
    decode(llm, 1, 16, tokens, seed)
    share: float = llm.collective_rpc(_take_usage)[0]
    return share


def profile(llm: Any, streams: int, prompt: int, tokens: int) -> dict[str, Any]:
    """Return the GPU time of each kernel, in microseconds a step, over a decode run."""
    import torch
    from torch.profiler import ProfilerActivity

    profiler = torch.profiler.profile(activities=[ProfilerActivity.CUDA])
    steps = len(decode(llm, streams, prompt, tokens, begin=profiler.start)["ms"])
    torch.cuda.synchronize()
    profiler.stop()
    kernels: dict[str, float] = {}
    for event in profiler.key_averages():
        if event.device_time_total:
            kernels[event.key[:120]] = event.device_time_total / steps
    ordered = dict(sorted(kernels.items(), key=lambda item: -item[1]))
    return {"steps": steps, "kernels": ordered}


def forward_times(llm: Any, streams: int, prompt: int, tokens: int) -> list[float]:
    """Return the GPU's time of each forward pass of a decode run, in ms, from CUDA events."""
    llm.collective_rpc(_time_forwards)
    try:
        decode(llm, streams, prompt, tokens, begin=lambda: llm.collective_rpc(_forget_forwards))
    finally:
        llm.collective_rpc(_stop_timing)
    found: list[float] = llm.collective_rpc(_take_forwards)[0]
    return found


def random_prompts(vocabulary: int, count: int, tokens: int, seed: int) -> list[list[int]]:
    """Return prompts of random token ids."""
    generator = np.random.default_rng([seed, count, tokens])
    found: list[list[int]] = generator.integers(2, vocabulary, (count, tokens)).tolist()
    return found


def hash_logits(worker: Any) -> None:
    """Keep the hash of every step's logits on the worker."""
    import hashlib

    worker.hashes = []
    model = worker.model_runner.model
    compute = model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        if logits is not None:
            data = logits.float().cpu().numpy().tobytes()
            worker.hashes.append(hashlib.sha256(data).hexdigest())
        return logits

    model.compute_logits = compute_logits


def _stop_hashing(worker: Any) -> None:
    del worker.model_runner.model.compute_logits


def take_hashes(worker: Any) -> list[str]:
    """Return the hashes kept since the last call."""
    hashes: list[str] = getattr(worker, "hashes", [])
    worker.hashes = []
    return hashes


def _time_forwards(worker: Any) -> None:
    import torch

    runner = worker.model_runner
    forward = runner._model_forward
    runner.passes = []

    def timed(*args: Any, **kwargs: Any) -> Any:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        output = forward(*args, **kwargs)
        ended.record()
        runner.passes.append((began, ended))
        return output

    runner._model_forward, runner.untimed = timed, forward


def _forget_forwards(worker: Any) -> None:
    worker.model_runner.passes.clear()


def _stop_timing(worker: Any) -> None:
    worker.model_runner._model_forward = worker.model_runner.untimed


def _take_forwards(worker: Any) -> list[float]:
    import torch

    torch.cuda.synchronize()
    return [began.elapsed_time(ended) for began, ended in worker.model_runner.passes]


def _resident(worker: Any) -> Any:
    return getattr(worker, "resident", None)


def _pool_shape(worker: Any) -> dict[str, Any] | None:
    resident = _resident(worker)
    if resident is None:
        return None
    shape = resident.shape
    found = {
        "row_bytes": shape.row.row_bytes,
        "experts": shape.experts,
        "layers": len(shape.layers),
        "slots": shape.slots,
        "ring": shape.ring,
    }
    if resident.fine is not None:
        found["fine_row_bytes"] = resident.fine.tier.shape.row.row_bytes
        found["fine_slots"] = resident.fine.tier.shape.slots
    return found


def _counts(worker: Any) -> dict[str, float]:
    import msgspec

    resident = _resident(worker)
    if resident is None:
        return {}
    found: dict[str, float] = msgspec.to_builtins(resident.counts)
    del found["row_bytes"]
    if resident.fine is not None and resident.fine.gate is not None:
        gate = msgspec.to_builtins(resident.fine.gate.counts)
        found.update({f"gate_{name}": value for name, value in gate.items()})
    return found


def _check(worker: Any) -> None:
    if _resident(worker) is not None:
        worker.resident.check_integrity()
        if hasattr(worker.resident.store, "check_integrity"):
            worker.resident.store.check_integrity()


def _save_heat(worker: Any) -> None:
    from moet_vllm.residency.heat import save_hot_keys

    save_hot_keys(worker.resident)


def _hottest(worker: Any) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = worker.resident.hottest()
    return found


def _preload(worker: Any, keys: list[tuple[int, int]]) -> None:
    worker.resident.preload(keys)


def _set_tau(worker: Any, tau: float) -> None:
    import msgspec

    gate = worker.resident.fine.gate
    gate.settings = msgspec.structs.replace(gate.settings, tau=tau)


def _record_confidence(worker: Any) -> None:
    gate = worker.resident.fine.gate
    decide = gate.decide
    gate.seen = []

    def record(reading: Any) -> Any:
        gate.seen.append(float(reading.confidence[reading.counts].min()))
        return decide(reading)

    gate.decide = record


def _take_confidence(worker: Any) -> list[float]:
    gate = worker.resident.fine.gate
    del gate.decide
    seen: list[float] = gate.seen
    return seen


def _record_usage(worker: Any) -> None:
    policy = worker.resident.policy
    want = policy.want
    policy.used = np.zeros((policy.layers, policy.experts))

    def record(mask: Any) -> Any:
        missing = want(mask)
        if not missing:  # the last pass of the step: its routing is the step's
            policy.used += mask
        return missing

    policy.want = record


def _take_usage(worker: Any) -> float:
    from served.models import HOT_SHARE

    policy = worker.resident.policy
    del policy.want
    used = np.sort(policy.used, axis=1)[:, ::-1]
    count = round(HOT_SHARE * used.shape[1])
    return float(used[:, :count].sum() / used.sum())


def copy_bandwidth(llm: Any, gib: float = 1.0, rounds: int = 5) -> list[float]:
    """Return the bandwidth of pinned host-to-device copies in GB/s, one figure a round."""
    import torch

    source = torch.empty(int(gib * 2**30), dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    found = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        found.append(source.nbytes / (time.perf_counter() - started) / 1e9)
    return found[1:]


TASKS: dict[str, Callable[..., Any]] = {
    "answer": answer,
    "hash_all": hash_all,
    "decode": decode,
    "prefill": prefill,
    "counts": counts,
    "check": check,
    "reopen": reopen,
    "save_heat": save_heat,
    "hottest": hottest,
    "preload": preload,
    "forget_heat": forget_heat,
    "set_tau": set_tau,
    "confidences": confidences,
    "usage": usage,
    "profile": profile,
    "forward_times": forward_times,
    "copy_bandwidth": copy_bandwidth,
}
