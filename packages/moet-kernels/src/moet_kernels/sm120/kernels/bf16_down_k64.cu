// Written by write.py's table of kernels. Twin of bf16_down_k64.sass.
#include "decode_bf16.cuh"

DOWN_BF16(bf16_down_k64, 2)
