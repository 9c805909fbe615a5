// Written by write.py's table of kernels. Twin of fp4_down_k64.sass.
#include "decode.cuh"

DOWN(fp4_down_k64, fp4, 2)
