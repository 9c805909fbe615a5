"""Runs steps over two small pools and prints what Telemetry publishes, for test_top.py.

Two JSON lines, one early and one late: the page of metrics, made as vLLM's API server makes it of
the files of all processes, and by rank the counts behind it. PROMETHEUS_MULTIPROC_DIR must be set.
"""

import sys
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from small_model import EXPERTS, TOP_K, SmallModel, tokens

from moet_vllm.residency.telemetry import Telemetry


def main(folder: Path) -> None:
    model = SmallModel()
    layers = len(model.layers)
    residents = [
        model.resident(layers * TOP_K + 1, model.packed(model.write_pack(folder), 6)),
        model.resident(layers * EXPERTS, model.pinned()),
    ]
    telemetry = [Telemetry(resident, rank, 0) for rank, resident in enumerate(residents)]
    for start, end in ((0, 6), (6, 18)):
        for seed in range(start, end):
            for resident, published in zip(residents, telemetry, strict=True):
                model.step(resident, tokens([1, 1, 3][seed % 3], seed))
                published.step_ended()
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        print_line(
            {
                "page": generate_latest(registry).decode(),
                "counts": [resident.counts for resident in residents],
                "store": residents[0].store.counters(),
                "held": [resident.policy.resident for resident in residents],
                "slots": [resident.shape.slots for resident in residents],
            }
        )


def print_line(data: dict) -> None:
    sys.stdout.write(msgspec.json.encode(data).decode() + "\n")


main(Path(sys.argv[1]))
