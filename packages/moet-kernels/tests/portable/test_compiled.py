"""The kernels compiled for GPUs that need not be there, and what became of their main loops."""

import pytest

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
