// Written by write_tiles.py's table of kernels. Twin of nv_gate_up_tiles.sass.
#include "tiles.cuh"

GATE_UP_TILES_NV(nv_gate_up_tiles, 4)
