// Written by write.py's table of kernels. Twin of w2_gate_up_k64.sass.
#include "decode.cuh"

GATE_UP(w2_gate_up_k64, w2, 2)
