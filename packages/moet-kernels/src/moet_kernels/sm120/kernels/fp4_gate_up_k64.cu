// Written by write.py's table of kernels. Twin of fp4_gate_up_k64.sass.
#include "decode.cuh"

GATE_UP(fp4_gate_up_k64, fp4, 2)
