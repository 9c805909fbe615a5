"""The process of one engine of a fleet: builds it as told, then does tasks until told no more.

    python -m served.engine ANSWER_FD    (started by `served.fleet`)

Orders are JSON lines on the standard input, the first one the `Spec`; answers are JSON lines on
the given file descriptor.
"""

import importlib
import json
import os
import sys
import traceback
from typing import Any

import msgspec

from served.fleet import Spec

__all__ = ["build", "first_port"]

WORKER = {
    "worker_cls": "moet_vllm.worker.MoetWorker",
    "scheduler_cls": "moet_vllm.scheduler.make_scheduler",
}

MODULES = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.model_executor.models.deepseek_v2",
)

PORTS = 10_000, 20_000
"""First port and number of ports that engines divide: below those that systems hand out."""

PORTS_EACH = 8

GRAPHS_ALONE = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def first_port(process: int) -> int:
    """Return where an engine looks for free ports, by the number of its process.

    Left alone, vLLM asks the system for a free port and listens later; engines that start together
    then get the same one.
    """
    first, count = PORTS
    return first + process * PORTS_EACH % count


def import_vllm() -> None:
    """Import what engines need, which takes seconds and no GPU."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    for module in MODULES:
        importlib.import_module(module)


def build(spec: Spec) -> Any:
    """Return vLLM's LLM."""
    import torch
    from vllm import LLM

    arguments: dict[str, Any] = {
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "seed": 0,
    }
    if torch.cuda.is_available():
        arguments["gpu_memory_utilization"] = 0.02  # the least that must be free; no limit here
        arguments["kv_cache_memory_bytes"] = 1 << 28
        arguments["enable_flashinfer_autotune"] = False  # it tunes nothing that runs here
        arguments["compilation_config"] = {
            "cudagraph_capture_sizes": [1, 2, 4, 8],
            **({} if spec.compiled else GRAPHS_ALONE),
        }
    else:
        arguments["enforce_eager"] = True
    arguments.update(spec.engine)
    if spec.moet is not None:
        arguments["additional_config"] = {"moet": spec.moet}
        if any(key in spec.moet for key in ("pool", "packs", "fine")):
            arguments.update(WORKER)
    if spec.without_experts:
        _leave_experts_out()
    return LLM(spec.model, **arguments)


def _leave_experts_out() -> None:
    import torch
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    def nothing(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.zeros_like(x)

    RoutedExperts.forward_modular = RoutedExperts.forward_monolithic = nothing


def main() -> None:
    """Build the engine and serve orders."""
    with os.fdopen(int(sys.argv[1]), "w") as answers:

        def say(message: dict[str, Any]) -> None:
            answers.write(json.dumps(message) + "\n")
            answers.flush()

        os.environ["VLLM_PORT"] = str(first_port(os.getpid()))
        import_vllm()
        spec = msgspec.convert(json.loads(sys.stdin.readline()), Spec)
        llm = build(spec)
        from served import tasks

        if spec.hashed:
            llm.collective_rpc(tasks.hash_logits)
        say(tasks.about(llm))
        for line in sys.stdin:
            order = json.loads(line)
            try:
                say({"result": tasks.TASKS[order["task"]](llm, **order["arguments"])})
            except Exception as error:  # the next order may still be possible
                traceback.print_exc()
                say({"error": f"{type(error).__name__}: {error}"[:2000]})


if __name__ == "__main__":
    main()
