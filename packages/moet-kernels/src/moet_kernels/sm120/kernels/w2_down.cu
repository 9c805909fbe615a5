// Written by write.py's table of kernels. Twin of w2_down.sass.
#include "decode.cuh"

DOWN(w2_down, w2, 4)
