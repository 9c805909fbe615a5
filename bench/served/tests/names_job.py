"""Loads checkpoints into vLLM's model classes, without attention; prints names that did not match.

usage: names_job.py FOLDER...

Latent attention does not exist on a CPU; its parameters belong to modules around it, which do.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import vllm.model_executor.models.deepseek_v2 as models
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator
from vllm.plugins import load_general_plugins


class Nothing(torch.nn.Module):
    """Stands in for a module without parameters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def names(folder: Path) -> dict[str, list[str]]:
    """Load a checkpoint; return the names on one side only."""
    config = EngineArgs(
        model=str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        additional_config={"moet": {}},
    ).create_engine_config()
    with set_current_vllm_config(config):
        (architecture,) = config.model_config.hf_config.architectures
        model = getattr(models, architecture)(vllm_config=config)
        files = sorted(str(path) for path in folder.glob("*.safetensors"))
        loaded = model.load_weights(safetensors_weights_iterator(files, False))
        for module in model.modules():
            if hasattr(module, "quant_method") and hasattr(module.quant_method, "staging"):
                module.quant_method.staging.finish()  # raises if an expert's tensor is missing
    parameters = {name for name, _ in model.named_parameters()}
    return {"empty": sorted(parameters - loaded), "unknown": sorted(loaded - parameters)}


def main(folders: list[Path]) -> None:
    """Print the names of each checkpoint as JSON."""
    for name in ("MultiHeadLatentAttentionWrapper", "SparseAttnIndexer", "DeepseekV32IndexerCache"):
        setattr(models, name, Nothing)
    load_general_plugins()
    torch.set_default_dtype(torch.bfloat16)
    with tempfile.TemporaryDirectory() as scratch, set_current_vllm_config(VllmConfig()):
        method = f"file://{scratch}/rendezvous"
        init_distributed_environment(1, 0, method, local_rank=0, backend="gloo")
        initialize_model_parallel(1, 1)
    print(json.dumps({folder.name: names(folder) for folder in folders}))


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
