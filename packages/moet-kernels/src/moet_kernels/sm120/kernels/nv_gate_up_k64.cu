// Written by write.py's table of kernels. Twin of nv_gate_up_k64.sass.
#include "decode.cuh"

GATE_UP_NV(nv_gate_up_k64, 2)
