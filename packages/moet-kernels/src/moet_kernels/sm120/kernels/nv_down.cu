// Written by write.py's table of kernels. Twin of nv_down.sass.
#include "decode.cuh"

DOWN_NV(nv_down, 4)
