"""W2 through the plugin answers as stock vLLM does on a checkpoint of decode(encode(w))."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_oracle import Comparison, compare

from moet_vllm.synthetic import SOURCES, Shape, write_checkpoint

pytestmark = pytest.mark.engine

SHAPE = Shape()
TOKENS = 64
PROMPTS = [
    np.random.default_rng(seed).integers(4, 250, size=length).tolist()
    for seed, length in enumerate((3, 9, 17, 33, 40, 64, 100, 128))
]
PARALLEL = {"tp1": (1, 1), "tp2": (2, 1), "pp2": (1, 2)}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def stock(folder: Path, run_engine: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a function that gives stock vLLM's answers on the decoded checkpoint of a source."""
    known: dict[str, dict[str, Any]] = {}

    def answers(source: str) -> dict[str, Any]:
        if source not in known:
            path = folder / f"{source}-decoded"
            write_checkpoint(path, source=source, shape=SHAPE, decoded="w2")
            known[source] = run_engine(path, prompts=PROMPTS, tokens=TOKENS)
        return known[source]

    return answers


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("source", SOURCES)
def test_w2_answers_as_stock_on_the_decoded_checkpoint(
    source: str,
    parallel: str,
    folder: Path,
    run_engine: Callable[..., dict[str, Any]],
    stock: Callable[..., dict[str, Any]],
    comparisons: dict[str, Comparison],
) -> None:
    tensor_parallel, pipeline_parallel = PARALLEL[parallel]
    path = write_checkpoint(folder / source, source=source, shape=SHAPE)
    wanted = stock(source)
    got = run_engine(
        path,
        moet={},
        prompts=PROMPTS,
        tokens=TOKENS,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
    )
    assert wanted["answers"] is not None, wanted["log"]
    assert got["answers"] is not None, got["log"]
    assert '"event":"converted"' in got["log"], "the plugin did not convert anything"
    found = compare(wanted["answers"], got["answers"])
    comparisons[f"{source} {parallel}"] = found
    assert not found.faults, found.faults
    assert found.compared >= len(PROMPTS) * TOKENS // 3, f"too little is comparable: {found}"
