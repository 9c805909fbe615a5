"""The committed table of predictions is what the cycle model says of the committed kernels."""

import msgspec
import pytest

from moet_kernels.sass.tools import have_tools
from moet_kernels.sm120.cards import CARDS
from moet_kernels.sm120.predict import (
    launches_beside,
    listing_digests,
    predict_kernel,
    trace_kernel,
)
from moet_kernels.sm120.predicted import MODELS, TOKENS, read_table
from moet_kernels.sm120.write import KERNELS

needs_nvdisasm = pytest.mark.skipif(not have_tools("nvdisasm"), reason="nvdisasm is missing")


def test_the_table_is_of_the_committed_kernels():
    table = read_table()
    assert listing_digests(table.listings) == table.listings, (
        "python -m moet_kernels.sm120.predict makes the table anew"
    )
    kernels = {launched.kernel for launched in table.launches}
    assert set(table.listings) == kernels - {"prepare", "combine"}


def test_what_stands_beside_them_takes_what_the_table_says():
    """Compilers differ in these, a little."""
    table = {one[:5]: one[5] for one in map(msgspec.structs.astuple, read_table().launches)}
    for one in launches_beside("GLM-5.2", "w2"):
        *key, microseconds, _ = msgspec.structs.astuple(one)
        assert table[tuple(key)] == pytest.approx(microseconds, rel=0.05), (
            "python -m moet_kernels.sm120.predict makes the table anew"
        )


def test_weights_are_counted_once():
    bits = {"w2": 2.25, "fp4-mx": 4.25, "fp4-nv": 4.5}
    for one in read_table().launches:
        if one.kernel in ("prepare", "combine"):
            continue
        geometry = MODELS[one.model]
        weights = geometry.hidden * geometry.intermediate * geometry.top_k * one.tokens
        weights *= 1 if one.kernel.endswith("down") else 2
        assert one.weight_bytes == pytest.approx(weights * bits[one.codec] / 8, rel=5e-3), one


@needs_nvdisasm
def test_a_row_made_anew_is_the_same():
    (kernel,) = (kernel for kernel in KERNELS if kernel.name == "bf16_down")
    geometry = MODELS["DeepSeek-V4-Flash"]
    traced = trace_kernel(kernel, "tuned", geometry.hidden, geometry.intermediate)
    blocks = geometry.hidden // 64 * geometry.top_k
    found = predict_kernel(traced, kernel.name, "tuned", CARDS["RTX 5090"].processor, blocks)
    (wanted,) = (
        one
        for one in read_table().launches
        if (one.card, one.model, one.kernel) == ("RTX 5090", "DeepSeek-V4-Flash", "bf16_down")
        and one.tokens == TOKENS[0]
    )
    assert found.microseconds == pytest.approx(wanted.microseconds, abs=1e-3)
    assert found.memory_bytes == wanted.weight_bytes
