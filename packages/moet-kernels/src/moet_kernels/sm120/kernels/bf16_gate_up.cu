// Written by write.py's table of kernels. Twin of bf16_gate_up.sass.
#include "decode_bf16.cuh"

GATE_UP_BF16(bf16_gate_up, 4)
