"""The kernels compiled for GPUs that need not be there, and what became of their main loops."""

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moet_kernels.portable import decode, grouping
from moet_kernels.portable.compiled import ARCHITECTURES, compile_kernel
from moet_kernels.portable.few import DOWN_SHAPE

WORDS = 16
"""Code words a lane decodes in an iteration of w2's decode kernels: 4 row blocks, 4 each."""


@pytest.mark.parametrize("number", ARCHITECTURES)
def test_decode_streams_16_byte_lanes_and_decodes_them_in_registers(number):
    found = compile_kernel("gate_up", number, "w2")
    assert found.stack == 0, "registers spill"
    assert found.count("LDG.E.128") == 4, found.loop
    assert found.count("HMMA.16816.F32.BF16") == 2 * WORDS, found.loop
    # one PRMT finds four levels, two spread them: no other way of decoding is as short
    assert found.count("PRMT") == 12 * WORDS, found.loop
    # nothing goes over shared memory or to another lane
    assert found.count("LDS", "STS", "SHFL", "BAR") == 0, found.loop
    # shifts and moves may be IMADs, products may not, but for the four addresses
    products = found.count("IMAD") - found.count("IMAD.SHL", "IMAD.U32", "IMAD.MOV", "IMAD.X")
    assert products - found.count("IMAD.IADD") <= 4, found.loop


@pytest.mark.parametrize("codec", ["fp4-mx", "fp4-nv"])
def test_decode_of_fp4_stays_in_registers(codec):
    found = compile_kernel("down", 90, codec)
    assert found.stack == 0, "registers spill"
    assert found.count("LDG.E.128") == DOWN_SHAPE.blocks, found.loop
    assert found.count("LDS", "STS", "SHFL", "BAR") == 0, found.loop


def test_decode_with_two_tiers_does_not_spill():
    assert compile_kernel("gate_up", 90, "w2", fine="fp4-nv").stack == 0


@pytest.mark.parametrize("kernel", ["gate_up_tiles", "down_tiles"])
def test_prefill_feeds_hoppers_matrix_units_from_registers(kernel):
    found = compile_kernel(kernel, 90, "w2")
    assert found.stack == 0, "registers spill"
    assert found.count("HGMMA.64x128x16") in (8, 16), found.loop
    assert found.count("STS") == 0, f"operands go over shared memory: {found.loop}"


@pytest.mark.parametrize("ids", ["*i32", "*i64"])
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        (decode.combine, {"HIDDEN": 6144, "TOP_K": 8, "FINE": True, "BLOCK": 1024}),
        (grouping.mark, {"FINE": True, "COUNT": True, "MARK": True, "BLOCK": 1024}),
        (grouping.count, {"FINE": False, "BLOCK": 1024}),
        (grouping.sort, {"GROUP": 128, "EXPERTS": 512, "BLOCK": 1024}),
    ],
    ids=["combine", "mark", "count", "sort"],
)
def test_the_kernels_around_compile_for_either_width_of_ids(kernel, constants, ids):
    kinds = {"ids": ids, "parts": "*fp32", "weights": "*fp32", "out": "*bf16", "wanted": "*u8"}
    kinds |= dict.fromkeys(("pairs", "experts", "groups"), "i32")
    signature = {
        arg: "constexpr" if arg in constants else kinds.get(arg, "*i32") for arg in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    options = {"enable_fp_fusion": False}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "fma" not in built.asm["ptx"], "k is summed with other roundings than torch has"
