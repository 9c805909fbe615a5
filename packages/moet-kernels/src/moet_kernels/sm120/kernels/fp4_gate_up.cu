// Written by write.py's table of kernels. Twin of fp4_gate_up.sass.
#include "decode.cuh"

GATE_UP(fp4_gate_up, fp4, 4)
