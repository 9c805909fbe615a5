"""Launches up to the driver: what they compile, on a machine without a GPU."""

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from moet_core.row import row_layout
from moet_kernels import arch
from moet_kernels.experts import Tier, experts

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 64, 32, 8, 2


class Hopper:
    """A driver that knows its GPU and can do nothing with it."""

    def get_current_device(self):
        return 99  # kernels are kept by device; no real one may get these

    def get_current_stream(self, _device=None):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def launches(monkeypatch):
    """The launches so far: kernel, grid and the compiled kernel, none of which ran."""
    found = []
    run = JITFunction.run

    def compile_only(kernel, *args, grid, warmup, **options):
        del warmup
        compiled = run(kernel, *args, grid=grid, warmup=True, **options)
        found.append((kernel.__name__, grid, compiled))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(arch, "capability", lambda _device: (9, 0))
    monkeypatch.setattr(driver, "_active", Hopper())
    return found


def tier(codec):
    layout = row_layout(codec, HIDDEN, INTERMEDIATE)
    pool = torch.zeros(EXPERTS, layout.row_bytes, dtype=torch.uint8)
    return Tier(pool, torch.arange(EXPERTS, dtype=torch.int32), layout)


def launch(tokens, fine=None, **options):
    base = tier("w2")
    ids = torch.zeros(tokens, TOP_K, dtype=torch.int32)
    x = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16)
    sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE}
    experts(x, torch.zeros(tokens, TOP_K), ids, *base[:2], **sizes, fine=fine, **options)


def test_one_kernel_of_each_kind_serves_1_to_16_tokens(launches):
    for tokens in (1, 2, 3, 8, 15, 16):
        launch(tokens)
    by_name = {}
    for name, _, compiled in launches:
        by_name.setdefault(name, set()).add(compiled.hash)
    assert set(by_name) == {"gate_up", "down", "combine"}
    assert all(len(hashes) == 1 for hashes in by_name.values()), by_name


def test_a_decode_step_is_three_launches(launches):
    launch(4, fine=tier("fp4-nv"))
    assert [name for name, _, _ in launches] == ["gate_up", "down", "combine"]
    assert launches[0][1] == (1, 4 * TOP_K)


def test_prefill_marks_only_for_who_asks_and_arranges_for_each_order_of_columns(launches):
    launch(40)
    names = ["count", "sort", "arrange", "gate_up_tiles", "down_tiles", "combine"]
    assert [name for name, _, _ in launches] == names
    launches.clear()
    launch(40, fine=tier("fp4-mx"), missing=torch.zeros(1, dtype=torch.int32))
    assert [name for name, _, _ in launches] == ["mark", *names[:3], *names[2:]]
