// Written by write.py's table of kernels. Twin of w2_gate_up.sass.
#include "decode.cuh"

GATE_UP(w2_gate_up, w2, 4)
