// Written by write.py's table of kernels. Twin of w2_down_k64.sass.
#include "decode.cuh"

DOWN(w2_down_k64, w2, 2)
