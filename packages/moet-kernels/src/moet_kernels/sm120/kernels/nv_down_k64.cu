// Written by write.py's table of kernels. Twin of nv_down_k64.sass.
#include "decode.cuh"

DOWN_NV(nv_down_k64, 2)
