"""Samples how much memory a process tree takes while something else runs."""

import threading

import psutil

from moet_cli.machine import gpu_memory_used, gpus

__all__ = ["MemorySampler", "tree_memory"]

SAMPLE_SECONDS = 1.0


def tree_memory(pid: int) -> int:
    """Return the bytes of a process and its descendants, shared pages counted once (PSS)."""
    total = 0
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue  # it ended between the two calls
    return total


class MemorySampler:
    """Samples in the background until the end of its `with` block.

    Attributes:
        host: bytes of the process tree, one sample a second.
        gpu: bytes in use on all GPUs by anyone, likewise; empty without a GPU.
    """

    def __init__(self, pid: int) -> None:
        self.host: list[int] = []
        self.gpu: list[int] = []
        self._pid = pid
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)

    def __enter__(self) -> "MemorySampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        has_gpu = bool(gpus())
        while True:
            self.host.append(tree_memory(self._pid))
            if has_gpu:
                self.gpu.append(gpu_memory_used())
            if self._done.wait(SAMPLE_SECONDS):
                return
