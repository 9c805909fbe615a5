"""Serves TinyMoE over packs that are damaged and mended meanwhile; prints what requests got.

usage: fault_job.py PACKS OUT.json
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

LONG = "class Reader:\n    def read(self, path):\n        return path\n\n" * 12
SHORT = "import os\n"


def forget_prefix_caching(worker: Any) -> None:
    worker.vllm_config.cache_config.enable_prefix_caching = False


def main() -> None:
    from vllm import LLM, SamplingParams

    from moet_store import find_packs
    from moet_vllm import tinymoe

    packs, out = Path(sys.argv[1]), Path(sys.argv[2])
    half = {"packs": str(packs), "pool": 256 * 8192 / 2**30, "report_seconds": 0}
    llm = LLM(
        str(tinymoe.CHECKPOINT),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=4,
        seed=0,
        additional_config={"moet": half},
        worker_cls="moet_vllm.worker.MoetWorker",
        scheduler_cls="moet_vllm.scheduler.make_scheduler",
    )
    greedy = SamplingParams(temperature=0, max_tokens=6, min_tokens=6, logprobs=1)

    def ask(*prompts: str) -> list[dict[str, Any]]:
        found = []
        for request in llm.generate(list(prompts), greedy, use_tqdm=False):
            output = request.outputs[0]
            answer = {"tokens": list(output.token_ids), "finish": output.finish_reason}
            answer["logprob"] = output.cumulative_logprob
            found.append(answer | {"label": request.kv_transfer_params})
        return found

    def cold(**more: Any) -> None:
        llm.reset_prefix_cache()
        llm.collective_rpc("reopen_pool", args=({**half, **more},))

    result: dict[str, Any] = {"clean": ask(LONG, SHORT)}
    result["cached"] = ask(LONG)
    (pack,) = find_packs(packs)
    good = pack.read_bytes()
    cold()
    with pack.open("r+b") as file:
        file.seek(4096)
        file.write(bytes(len(good) - 4096))
    result["damaged"] = ask(LONG, SHORT)
    result["still damaged"] = ask(SHORT)
    with pack.open("r+b") as file:
        file.write(good)
    # Not cold: what the failed steps wrote to the KV cache must not be found by its tokens.
    result["mended"] = ask(LONG, SHORT)
    # Refused beside prefix caching; the answer of this one request is not about that.
    llm.collective_rpc(forget_prefix_caching)
    cold(miss_tolerance=10**6)
    result["degraded"] = ask(SHORT)
    cold(pool="all", host_store=None)
    result["all"] = ask(LONG, SHORT)
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
