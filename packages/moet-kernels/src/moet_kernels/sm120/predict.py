"""Predicts decode steps with the cycle model: `python -m moet_kernels.sm120.predict`.

Writes the table of `predicted`. Needs nvdisasm, no GPU.
"""

import struct
import sys
from collections.abc import Iterable, Iterator
from itertools import product

import msgspec
import numpy as np

from moet_core.geometry import ModelGeometry
from moet_core.row import row_layout
from moet_kernels.committed import digest
from moet_kernels.sass.assemble import disassemble
from moet_kernels.sass.cubin import Cubin
from moet_kernels.sass.emulate import Launch
from moet_kernels.sass.machine import Buffer
from moet_kernels.sass.source import Program, parse_source
from moet_kernels.sm120 import cases, cases_bf16
from moet_kernels.sm120.cards import CARDS
from moet_kernels.sm120.cases import DOWN_ROWS, GATE_UP_ROWS, GROUP, THREADS
from moet_kernels.sm120.cycles import Op, Prediction, Processor, predict, trace
from moet_kernels.sm120.manifest import FOLDER, cubin_path, listing_path, read_manifest
from moet_kernels.sm120.predicted import MODELS, PATH, TOKENS, Launched, Table
from moet_kernels.sm120.write import KERNELS, Kernel

__all__ = [
    "launches_beside",
    "listing_digests",
    "predict_kernel",
    "predicted_launches",
    "trace_kernel",
]

_FAMILIES = {"w2": "bf16", "fp4-mx": "fp4", "fp4-nv": "nv"}
"""The family of kernels that serves a codec by default."""

_BESIDE = ("prepare", "combine")
"""Kernels before and behind those of the codec."""

_PAGE = 1 << 28
Traced = tuple[Program, list[list[Op]]]


def trace_kernel(kernel: Kernel, variant: str, hidden: int, intermediate: int) -> Traced:
    """Run one block of a decode kernel in the emulator, with one vector.

    Args:
        kernel: Of the committed ones.
        variant: "tuned", "safe" or "twin".
        hidden: H of the experts.
        intermediate: I of the experts.
    """
    rows = DOWN_ROWS if kernel.down else GATE_UP_ROWS
    shape = (rows, intermediate) if kernel.down else (hidden, rows)
    if kernel.codec == "bf16":
        case = cases_bf16.make_bf16_case(*shape, (1,), 0, down=kernel.down, exact=True)
        launch, buffers = cases_bf16.launch_of(case)
    else:
        codec = cases.CODECS[kernel.codec]
        case = cases.make_case(codec, *shape, (1,), 0, down=kernel.down, exact=True)
        launch, buffers = cases.launch_of(case)
    experts = next(b.address for b in buffers if b.data.size == case.rows.size)
    program = disassemble(Cubin.open(cubin_path(FOLDER, kernel.name, variant)), kernel.name)
    return program, trace(program, launch, buffers, lambda address: address == experts)


def predict_kernel(
    traced: Traced, kernel: str, variant: str, processor: Processor, blocks: int
) -> Prediction:
    """Predict a launch of blocks that all do what was traced."""
    built = read_manifest().kernels[kernel]
    program, warps = traced
    registers = built.registers[variant]
    return predict(
        program, warps, processor, blocks=blocks, shared=built.shared, registers=registers
    )


def predicted_launches(model: str, codec: str) -> Iterator[Launched]:
    """Yield what the kernels of a layer take, on every card and for every number of tokens."""
    geometry = MODELS[model]
    hidden, intermediate = geometry.hidden, geometry.intermediate
    kernels = [k for k in KERNELS if k.codec == _FAMILIES[codec] and k.steps == 4]
    for kernel in kernels:
        traced = trace_kernel(kernel, "tuned", hidden, intermediate)
        rows, wanted = (DOWN_ROWS, hidden) if kernel.down else (GATE_UP_ROWS, intermediate)
        for card, tokens in product(CARDS, TOKENS):
            blocks = -(-wanted // rows) * geometry.top_k * tokens
            processor = CARDS[card].processor
            found = predict_kernel(traced, kernel.name, "tuned", processor, blocks)
            figures = round(found.microseconds, 3), found.memory_bytes
            yield Launched(card, model, codec, tokens, kernel.name, *figures)
    yield from launches_beside(model, codec)


def launches_beside(model: str, codec: str) -> Iterator[Launched]:
    """Yield what the kernels before and behind those of the codec take."""
    geometry = MODELS[model]
    for name, tokens in product(_BESIDE, TOKENS):
        launch, buffers = _beside(name, geometry, codec, tokens)
        program = parse_source(listing_path(FOLDER, name).read_text())
        traced = program, trace(program, launch, buffers, lambda _address: False)
        blocks = tokens * -(-geometry.hidden // (4 * THREADS)) if name == "combine" else 1
        for card in CARDS:
            found = predict_kernel(traced, name, "twin", CARDS[card].processor, blocks)
            yield Launched(card, model, codec, tokens, name, round(found.microseconds, 3), 0)


def _beside(
    name: str, geometry: ModelGeometry, codec: str, tokens: int
) -> tuple[Launch, list[Buffer]]:
    """A block of prepare, the one that makes the groups and takes longest, or of combine."""
    pairs, hidden = tokens * geometry.top_k, geometry.hidden
    ids = np.arange(pairs, dtype=np.int32)
    if name == "combine":
        weights, present = np.ones(pairs, np.float32), np.ones(pairs, np.uint8)
        arrays: list[np.ndarray] = [np.ones(pairs * hidden, np.float32), weights, present]
        outputs, tail = [2 * tokens * hidden], struct.pack("<2I", hidden, geometry.top_k)
    else:
        arrays = [ids, np.arange(geometry.experts, dtype=np.int32)]
        outputs, tail = [GROUP.itemsize * pairs, pairs, geometry.experts], b""
    buffers = [Buffer.of(_PAGE * (i + 1), array) for i, array in enumerate(arrays)]
    buffers += [Buffer.empty(_PAGE * (i + 9), size) for i, size in enumerate(outputs)]
    at = [buffer.address for buffer in buffers]
    if name == "combine":
        return Launch((1, 1, 1), THREADS, struct.pack("<4Q", *at) + tail), buffers
    ids_at, slots, groups, present_at, wanted = at
    row_bytes = row_layout(codec, hidden, geometry.intermediate).row_bytes
    base = (slots, _PAGE * 16, row_bytes, groups)
    numbers = (1, 1, pairs, 65536 // geometry.top_k + 1, geometry.experts, hidden, 2)
    pointers = (0, ids_at, *base, 0, 0, 0, 0, 0, 0, present_at, wanted, 0)
    return Launch((1, 1, 1), THREADS, struct.pack("<15Q7I", *pointers, *numbers)), buffers


def listing_digests(kernels: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of the text of each kernel that is written by hand."""
    names = sorted(set(kernels) - set(_BESIDE))
    return {name: digest((FOLDER / f"{name}.sass").read_bytes()) for name in names}


def main() -> int:
    """Write the table."""
    launches = [
        launched
        for model, codec in product(MODELS, _FAMILIES)
        for launched in predicted_launches(model, codec)
    ]
    listings = listing_digests({launched.kernel for launched in launches})
    text = msgspec.json.format(msgspec.json.encode(Table(listings, tuple(launches))), indent=1)
    PATH.write_bytes(text + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
