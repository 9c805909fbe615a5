"""Serves held-out texts token by token, and compares every logit with that of FP4 experts.

    PYTHONPATH=bench python bench/gate/curves.py bench/results/gate-curves.json [--short]

A text's beginning is the prompt; the rest is decoded one token at a time, but each sampled token is
replaced by the text's own. So all configurations answer the same questions, each with the KV cache
that it wrote itself. The reference has every expert at FP4, which is what TinyMoE's checkpoint
holds. Every other configuration starts with cold pools.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# The matrices are small: two threads mostly wait for each other.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")

FINE_ROW, BASE_EXPERTS = 16384, 512
TAUS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
SERVED_TAUS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
SHARES = (0.1, 0.25, 0.5)
GATE_SHARE = 0.25
AUDIT = 0.1
QUARTERS = ("first", "second", "third", "last")


class Texts:
    """Token ids: `prompt` tokens are read, then `decoded` are decoded one by one.

    Attributes:
        bytes: What the decoded tokens of each text are, in UTF-8; `size` tells that of tokens.
    """

    def __init__(
        self,
        name: str,
        ids: list[list[int]],
        prompt: int,
        decoded: int,
        size: Callable[[list[int]], int],
    ) -> None:
        self.name = name
        self.ids = [part[: prompt + decoded] for part in ids if len(part) >= prompt + decoded]
        self.prompt = prompt
        self.decoded = decoded
        self.bytes = [size(part) - size(part[:prompt]) for part in self.ids]
        if not self.ids:
            raise ValueError(f"no {name} text has {prompt + decoded} tokens")


class Recorder:
    """Keeps the logits of every step, and has the forced token sampled."""

    def __init__(self, worker: Any) -> None:
        self.logits: list[NDArray[np.float32]] = []
        self.forced: list[int] = []
        model = worker.model_runner.model
        compute = model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            self.logits.append(logits[0].float().numpy().copy())
            if self.forced:
                logits = logits.clone()
                logits[0] = -1e4
                logits[0, self.forced.pop(0)] = 0.0
            return logits

        model.compute_logits = compute_logits


def worker_of(llm: Any) -> Any:
    """Return the worker of an engine that runs in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


@contextmanager
def engine(moet: dict[str, Any], model: str | None = None) -> Iterator[tuple[Any, Recorder]]:
    """Start an engine for TinyMoE, or for a model with its values."""
    from vllm import LLM

    from moet_vllm import tinymoe

    classes = {}
    if set(moet) - {"experts"}:
        classes = {
            "worker_cls": "moet_vllm.worker.MoetWorker",
            "scheduler_cls": "moet_vllm.scheduler.make_scheduler",
        }
    llm = LLM(
        model or str(tinymoe.CHECKPOINT),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=2560,
        max_num_seqs=1,
        enable_prefix_caching=False,
        async_scheduling=False,
        seed=0,
        additional_config={"moet": moet},
        **classes,
    )
    yield llm, Recorder(worker_of(llm))


def decode(llm: Any, recorder: Recorder, texts: Texts) -> NDArray[np.float32]:
    """Return the log probabilities of each decoded position, float32 [texts, decoded, V]."""
    from vllm import SamplingParams

    found = []
    for ids in texts.ids:
        recorder.logits.clear()
        recorder.forced = ids[texts.prompt :]
        greedy = SamplingParams(
            temperature=0, max_tokens=texts.decoded, min_tokens=texts.decoded, ignore_eos=True
        )
        prompt = {"prompt_token_ids": ids[: texts.prompt]}
        (request,) = llm.generate([prompt], greedy, use_tqdm=False)
        if list(request.outputs[0].token_ids) != ids[texts.prompt :]:
            raise RuntimeError("the engine did not sample the text's own tokens")
        logits = np.stack(recorder.logits[-texts.decoded :])
        found.append(logits - log_sum_exp(logits)[:, None])
    return np.stack(found)


def log_sum_exp(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return log(sum(exp(x))) over the last axis."""
    top = logits.max(-1)
    return top + np.log(np.exp(logits - top[..., None]).sum(-1))


def divergence(native: NDArray[np.float32], found: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return KL(native || found) in nats of each position."""
    p = np.exp(native.astype(np.float64))
    return (p * (native.astype(np.float64) - found)).sum(-1)


def bits_per_byte(texts: Texts, found: NDArray[np.float32]) -> float:
    """Return what the texts' own tokens cost, in bits per byte of all texts together."""
    cost = 0.0
    for ids, logprobs in zip(texts.ids, found, strict=True):
        own = logprobs[np.arange(texts.decoded), ids[texts.prompt :]]
        cost -= float(own.astype(np.float64).sum())
    return cost / np.log(2) / sum(texts.bytes)


def configurations(packs: Path) -> dict[str, dict[str, Any]]:
    """Return the plugin's settings of each configuration, by name."""
    base = {"packs": str(packs), "report_seconds": 0}
    gate = {"fine": share(GATE_SHARE), "gate": "max_prob", "gate_passes": 3}
    found = {"W2": dict(base)}
    found["W2, prompts fine"] = base | gate | {"tau": 0.0}
    for part in SHARES:
        found[f"fine tier of {part:.0%} by use"] = base | {"fine": share(part)}
    for tau in SERVED_TAUS:
        found[f"gate {tau}"] = base | gate | {"tau": tau}
    found["gate 0.6, prompts at base"] = base | gate | {"tau": 0.6, "prompts": "base"}
    found[f"gate 0.6, {AUDIT:.0%} audited"] = base | gate | {"tau": 0.6, "gate_audit": AUDIT}
    return found


def share(part: float) -> float:
    """Return the GiB of a fine tier for a share of the experts."""
    return part * BASE_EXPERTS * FINE_ROW / 2**30


def measure(
    llm: Any, recorder: Recorder, settings: dict[str, Any], texts: list[Texts]
) -> tuple[list[NDArray[np.float32]], Any]:
    """Run one configuration from cold pools; return log probabilities and the resident experts."""
    llm.collective_rpc("reopen_pool", args=(settings,))
    found = [decode(llm, recorder, part) for part in texts]
    resident = worker_of(llm).resident
    resident.check_integrity()
    return found, resident


def main() -> None:
    """Measure all configurations."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--short", action="store_true", help="few texts and configurations")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    from moet_cli.bench import run_result
    from moet_core.results import Measurement, measurement, write_result
    from moet_vllm import tinymoe

    began = datetime.now(UTC)
    tokenizer = AutoTokenizer.from_pretrained(tinymoe.CHECKPOINT)
    texts = read_texts(tokenizer, short=args.short)
    with engine({"experts": "fp4"}) as (llm, recorder):
        native = [decode(llm, recorder, part) for part in texts]
    measurements: list[Measurement] = []

    def add(figure: str, row: str, column: str, unit: str, values: list[float]) -> None:
        measurements.append(measurement(f"{figure}: {row}, {column}", unit, values))

    for part, logprobs in zip(texts, native, strict=True):
        add("bits per byte", "FP4", part.name, "bits", [bits_per_byte(part, logprobs)])
    with tempfile.TemporaryDirectory() as folder:
        packs = Path(folder) / "packs"
        first = {"packs": str(packs), "report_seconds": 0, "fine": share(GATE_SHARE)}
        first |= {"gate": "max_prob", "tau": 0.0}
        with engine(first) as (llm, recorder):
            chosen = configurations(packs)
            if args.short:
                chosen = {name: chosen[name] for name in ("W2", "W2, prompts fine", "gate 0.6")}
            lost: dict[str, float] = {}
            for name, settings in chosen.items():
                print(name, file=sys.stderr, flush=True)
                found, resident = measure(llm, recorder, settings, texts)
                for part, wanted, got in zip(texts, native, found, strict=True):
                    kl = divergence(wanted, got).mean(-1).tolist()
                    same = (wanted.argmax(-1) == got.argmax(-1)).mean(-1).tolist()
                    add("KL", name, part.name, "nats", kl)
                    add("bits per byte", name, part.name, "bits", [bits_per_byte(part, got)])
                    add("top-1 agreement", name, part.name, "fraction", same)
                    mean = float(np.mean(kl))
                    lost.setdefault(part.name, mean)
                    kept = 1 - mean / lost[part.name]
                    add("share of the KL recovered", name, part.name, "fraction", [kept])
                    by_place = np.array_split(divergence(wanted, got), 4, axis=-1)
                    for quarter, values in zip(QUARTERS, by_place, strict=True):
                        figure = f"KL by position, {part.name}"
                        add(figure, name, quarter, "nats", values.mean(-1).tolist())
                add_counts(add, name, resident)
                if name == "W2, prompts fine":
                    add_decisions(add, texts[0], native[0], found[0])
    notes = (
        f"{', '.join(f'{len(t.ids)} {t.name} texts of {t.prompt} + {t.decoded}' for t in texts)} "
        "tokens (prompt + decoded), one at a time; samples are texts",
        f"gate: fine tier of {GATE_SHARE:.0%} of the experts, no budget, at most 3 finer passes",
    )
    write_result(args.out, run_result("gate-curves", began, measurements, notes=notes))


def read_texts(tokenizer: Any, *, short: bool) -> list[Texts]:
    """Return held-out Python: short prompts, and prompts of 1500 tokens."""
    from moet_vllm.tinymoe import held_out

    texts = [text.text for text in held_out().texts]
    ids = [tokenizer.encode(text) for text in texts]
    ids.sort(key=len)

    def size(tokens: list[int]) -> int:
        return len(tokenizer.decode(tokens).encode())

    long = [part for part in ids if len(part) >= 1564]
    some = [part for part in ids if len(part) >= 128]
    if short:
        return [Texts("short", some[:2], 64, 16, size), Texts("long", long[:1], 1500, 8, size)]
    return [Texts("short", some[:16], 64, 48, size), Texts("long", long[:6], 1500, 32, size)]


def add_counts(add: Any, name: str, resident: Any) -> None:
    """Report what a configuration did."""
    counts = resident.counts
    steps = counts.steps
    add("work a decoded token", name, "passes", "passes", [counts.passes / steps])
    gate = resident.fine.gate if resident.fine is not None else None
    if gate is None:
        return
    counted = gate.counts
    add("work a decoded token", name, "fires", "fires", [counted.fires / counted.checked])
    add("work a decoded token", name, "fine experts", "experts", [counted.promoted / steps])
    if counted.fires:
        add("what fires change", name, "flipped", "fraction", [counted.flipped / counted.fires])
    if counted.audits:
        share_ = counted.audit_flipped / counted.audits
        add("what fires change", name, "flipped by audits", "fraction", [share_])


def add_decisions(
    add: Any, texts: Texts, native: NDArray[np.float32], found: NDArray[np.float32]
) -> None:
    """Report how well confidence tells where 2-bit experts choose another token than FP4 ones."""
    # The first decoded row is the prompt's last, which no gate sees.
    confidence = np.exp(found[:, 1:].max(-1)).ravel()
    wrong = (found[:, 1:].argmax(-1) != native[:, 1:].argmax(-1)).ravel()
    for tau in TAUS:
        fires = confidence <= tau
        row = f"tau {tau}"
        add("decisions", row, "fires", "fraction", [float(fires.mean())])
        if fires.any():
            add("decisions", row, "precision", "fraction", [float(wrong[fires].mean())])
        if wrong.any():
            add("decisions", row, "recall", "fraction", [float(fires[wrong].mean())])


if __name__ == "__main__":
    main()
