// Written by write_tiles.py's table of kernels. Twin of w2_gate_up_tiles_k64.sass.
#include "tiles.cuh"

GATE_UP_TILES(w2_gate_up_tiles_k64, w2, 2)
