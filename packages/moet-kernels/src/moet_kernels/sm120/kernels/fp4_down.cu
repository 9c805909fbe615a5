// Written by write.py's table of kernels. Twin of fp4_down.sass.
#include "decode.cuh"

DOWN(fp4_down, fp4, 4)
