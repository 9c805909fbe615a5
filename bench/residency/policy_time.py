"""Measure what a step of the residency policy costs at the size of GLM-5.2, into a result file.

    PYTHONPATH=bench python -m residency.policy_time FILE

Steps of four tokens, routed by a skewed draw, over a pool of half the experts: several hundred
experts a step are missing, and all of them evict.
"""

import argparse
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import numpy as np

from moet_cli.bench import run_result
from moet_core.geometry import GLM_5_2
from moet_core.residency import PoolPolicy
from moet_core.results import measurement, write_result

STEPS, WARM_UP, TOKENS, COVERAGE, PROMOTIONS = 600, 300, 4, 0.5, 8

T = TypeVar("T")


def main() -> None:
    """Write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    started = datetime.now(UTC)
    layers, experts = len(GLM_5_2.moe_layers), GLM_5_2.experts
    slots = round(layers * experts * COVERAGE)
    policy = PoolPolicy(layers=layers, experts=experts, slots=slots)
    policy.publish(policy.preload(np.ndindex(layers, experts)))
    samples: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], T]) -> T:
        begin = time.perf_counter()
        found = call()
        samples.setdefault(name, []).append(1e3 * (time.perf_counter() - begin))
        return found

    rng = np.random.default_rng(0)
    # Popularity falls with the rank, as 1 / (rank + 64), in an order of its own for each layer.
    popularity = rng.permuted(np.tile(np.log(1 / (np.arange(experts) + 64)), (layers, 1)), axis=1)
    rows = np.arange(layers)[:, None]
    missing_counts = []
    for _ in range(STEPS):
        wanted = np.zeros((layers, experts), bool)
        for _ in range(TOKENS):
            # The largest of popularity plus Gumbel noise are a draw without repetition.
            noisy = popularity + rng.gumbel(size=(layers, experts))
            wanted[rows, np.argpartition(-noisy, GLM_5_2.top_k)[:, : GLM_5_2.top_k]] = True
        timed("begin_step", policy.begin_step)
        missing = timed("want", lambda wanted=wanted: policy.want(wanted))
        moves = timed("plan", lambda missing=missing: policy.plan(missing))
        timed("publish", lambda moves=moves: policy.publish(moves))
        policy.publish(timed("promotions", lambda: policy.promotions(PROMOTIONS)))
        policy.check_integrity()
        missing_counts.append(len(missing))
    found = [measurement(name, "ms", values[WARM_UP:]) for name, values in samples.items()]
    whole = np.sum([values[WARM_UP:] for values in samples.values()], axis=0)
    found += [
        measurement("all of a step", "ms", whole.tolist()),
        measurement("missing experts of a step", "experts", missing_counts[WARM_UP:]),
    ]
    notes = (
        f"{layers} layers of {experts} experts, {slots} slots, steps of {TOKENS} tokens, "
        f"top {GLM_5_2.top_k}; the last {STEPS - WARM_UP} of {STEPS} steps",
        "on cores shared with other work: the maxima are those of the scheduler",
    )
    write_result(args.file, run_result("residency-policy", started, found, notes=notes))
    for one in found:
        print(f"{one.name}: {one.median:.3g} {one.unit} (median)")


if __name__ == "__main__":
    main()
