"""Kernels are told apart by name."""

import pytest
from served.kernels import expert_time, is_of_experts


@pytest.mark.parametrize(
    "name",
    [
        "gate_up",
        "down_tiles",
        "combine",
        "gate_up_fp4_mx",
        "nv_down_k64",
        "prepare",
        "void marlin_moe_wna16::Marlin<__nv_bfloat16, 4>",
        "void vllm::moe::moe_align_block_size_kernel<int>",
    ],
)
def test_a_kernel_of_the_experts(name):
    assert is_of_experts(name)


@pytest.mark.parametrize(
    "name",
    [
        "nvjet_tst_64x8",
        "void vllm::act_and_mul_kernel",
        "void grouped_topk_fused_small",
        "sorted_something",
        "downsample",
        "prepared",
        "w4_down",
    ],
)
def test_another_kernel(name):
    assert not is_of_experts(name)


def test_the_time_of_experts_is_that_of_their_kernels():
    assert expert_time({"gate_up": 2.0, "down": 1.0, "nvjet": 5.0}) == 3.0
