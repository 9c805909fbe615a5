"""What a pool of experts asks of the engine around it, and what it is told of its place there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group

from moet_core.errors import ConfigError
from moet_vllm.config import SCHEDULER, MoetConfig
from moet_vllm.residency.build import Rank
from moet_vllm.residency.pinning import pin

__all__ = ["check_engine", "rank_of"]


def check_engine(
    config: MoetConfig, vllm_config: VllmConfig, v2_runner: bool, device: torch.device
) -> None:
    """Refuse what a pool cannot serve.

    Raises:
        ConfigError: It names what was found, and what to do.
    """
    parallel = vllm_config.parallel_config
    scheduler = vllm_config.scheduler_config.scheduler_cls
    drafts = vllm_config.speculative_config
    faults = [
        (v2_runner, "vLLM's second model runner", "unset VLLM_USE_V2_MODEL_RUNNER"),
        (
            scheduler != SCHEDULER,
            f"the scheduler {scheduler!r}",
            f"add --scheduler-cls {SCHEDULER}",
        ),
        (
            parallel.data_parallel_size > 1,
            f"{parallel.data_parallel_size} data-parallel engines, whose layers run in step with "
            "each other",
            "start one server for each, or use tensor parallelism",
        ),
        (
            config.pool == "auto" and device.type == "cpu",
            "pool=auto on a CPU, whose memory is not the pool's alone",
            "give its size in GiB",
        ),
        (
            vllm_config.model_config.has_inner_state,
            "a model with recurrent state, which a repeated pass would advance twice",
            "serve it without pool and packs",
        ),
        (
            drafts is not None and drafts.method != "mtp",
            f"speculative decoding by {drafts.method if drafts else None}",
            "only the model's own MTP layers draft beside a pool",
        ),
        (
            config.gate != "off" and parallel.pipeline_parallel_size > 1,
            "a confidence gate over pipeline stages, all of which would have to run again",
            "use tensor parallelism, or set gate to off",
        ),
        (
            config.miss_tolerance > 0 and vllm_config.cache_config.enable_prefix_caching,
            "miss_tolerance beside prefix caching, through which an approximate step's blocks "
            "would reach exact requests",
            "add --no-enable-prefix-caching",
        ),
        (
            vllm_config.cache_config.calculate_kv_scales,
            "--calculate-kv-scales, whose first pass may lack experts",
            "leave it out",
        ),
        (
            vllm_config.kv_transfer_config is not None,
            "KV transfer beside a pool of experts",
            "leave --kv-transfer-config out",
        ),
    ]
    for is_fault, found, advice in faults:
        if is_fault:
            raise ConfigError(f"A pool of experts cannot honour {found}: {advice}.")


def rank_of(vllm_config: VllmConfig, device: torch.device) -> Rank:
    """Return what a rank needs to know of itself.

    Raises:
        ConfigError: The checkpoint is no local folder.
    """
    group = get_tp_group()
    return Rank(
        tp_rank=group.rank_in_group,
        tp_size=group.world_size,
        device=torch.device(device),
        checkpoint=_checkpoint(vllm_config),
        agree=_largest_of(group.cpu_group) if group.world_size > 1 else None,
        pin=pin if torch.device(device).type == "cuda" else None,
        padded=_padded_rows(vllm_config, torch.device(device)),
    )


def _padded_rows(vllm_config: VllmConfig, device: torch.device) -> int:
    """Return the rows at most of a padded pass: 0 where no CUDA graph pads one."""
    if device.type != "cuda" or vllm_config.model_config.dtype != torch.bfloat16:
        return 0
    graphs = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    return max(int(graphs), vllm_config.scheduler_config.max_num_batched_tokens)


def _largest_of(group: Any) -> Callable[[int], int]:
    def agree(value: int) -> int:
        number = torch.tensor([value], dtype=torch.int64)
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, group=group)
        return int(number)

    return agree


def _checkpoint(vllm_config: VllmConfig) -> Path | None:
    if vllm_config.load_config.load_format == "dummy":
        return None
    folder = Path(vllm_config.model_config.model)
    if not folder.is_dir():
        raise ConfigError(
            f"A pool of experts needs the checkpoint in a local folder, got {folder}. "
            "`moet serve` downloads it and names the folder."
        )
    return folder
