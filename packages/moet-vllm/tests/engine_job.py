"""Runs one vLLM engine for a test, in a process of its own, and prints what it answered.

usage: engine_job.py JOB.json OUT.json

The job: `model`, `moet` (the plugin's settings or null), `tensor_parallel`, `pipeline_parallel`,
`dtype`, `prompts` (lists of token ids), `tokens` (how many to generate), `engine` (more arguments
of vLLM's LLM; with `speculative_config` the share of accepted drafts at each position is reported,
and of one rank what it costs with drafts and without, if they may be suspended),
`measure_load` (true: report the memory that loading the experts took).
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

# Eager mode needs no compiler; this skips the few functions vLLM compiles all the same.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def anonymous_bytes() -> int:
    """Memory of this process that no file backs (mapped checkpoint shards do not count)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


class LoadMemory:
    """Samples anonymous memory from the first layer's creation to the last one's conversion."""

    def __init__(self) -> None:
        from moet_vllm import report

        self.before = self.peak = 0
        self._stop = threading.Event()
        self._expect, self._emit = report.expect_layer, report.emit
        report.expect_layer, report.emit = self._first_layer, self._last_layer

    def _first_layer(self, name: str) -> None:
        self._expect(name)
        if not self.before:
            self.before = anonymous_bytes()
            threading.Thread(target=self._sample, daemon=True).start()

    def _last_layer(self, event: Any) -> None:
        self._stop.set()
        self._emit(event)

    def _sample(self) -> None:
        while not self._stop.is_set():
            self.peak = max(self.peak, anonymous_bytes())
            time.sleep(0.001)


def main() -> None:
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    world = job["tensor_parallel"] * job["pipeline_parallel"]
    if world == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    else:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
            str(i % (os.cpu_count() or 1)) for i in range(world)
        )
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = {}
    if job["moet"] is not None:
        settings["additional_config"] = {"moet": job["moet"]}
    memory = LoadMemory() if job.get("measure_load") else None
    started = time.perf_counter()
    llm = LLM(
        job["model"],
        dtype=job["dtype"],
        tensor_parallel_size=job["tensor_parallel"],
        pipeline_parallel_size=job["pipeline_parallel"],
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        seed=0,
        **{**settings, **job.get("engine", {})},
    )
    loaded = time.perf_counter() - started
    parameters = SamplingParams(
        temperature=0, max_tokens=job["tokens"], min_tokens=job["tokens"], logprobs=5
    )
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    answers = []
    for request in llm.generate(prompts, parameters, use_tqdm=False):
        output = request.outputs[0]
        assert output.logprobs is not None
        answers.append(
            {
                "tokens": list(output.token_ids),
                "logprobs": [
                    {str(token): entry.logprob for token, entry in position.items()}
                    for position in output.logprobs
                ],
            }
        )
    result: dict[str, Any] = {"answers": answers, "load_seconds": loaded}
    if "speculative_config" in job.get("engine", {}):
        found = {metric.name: metric for metric in llm.get_metrics()}
        steps = found["vllm:spec_decode_num_drafts"].value
        accepted = found["vllm:spec_decode_num_accepted_tokens_per_pos"].values
        result["acceptance"] = [count / steps for count in accepted]
        if (job["moet"] or {}).get("suspend_drafts") and world == 1:
            scheduler = llm.llm_engine.engine_core.engine_core.scheduler
            result["draft_cost"] = scheduler._suspension.switch.cost
    if memory is not None:
        result["load_bytes"] = memory.peak - memory.before
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
