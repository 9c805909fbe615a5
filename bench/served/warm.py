"""Has vLLM inspect model classes once, which it keeps in its cache, before many engines start.

    PYTHONPATH=bench python -m served.warm GlmMoeDsaForCausalLM DeepseekV3ForCausalLM

Each inspection takes a process that imports all of vLLM; engines that find it in the cache
(`VLLM_CACHE_ROOT`) start none.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

from served.engine import import_vllm

__all__ = ["main"]


def main() -> None:
    """Inspect the classes named on the command line, side by side: each takes a process."""
    import_vllm()
    from vllm.model_executor.models.registry import ModelRegistry

    def inspect(name: str) -> None:
        ModelRegistry.models[name].inspect_model_cls()

    with ThreadPoolExecutor() as pool:
        list(pool.map(inspect, sys.argv[1:]))


if __name__ == "__main__":
    main()
