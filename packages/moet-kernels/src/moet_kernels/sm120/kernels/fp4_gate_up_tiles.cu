// Written by write_tiles.py's table of kernels. Twin of fp4_gate_up_tiles.sass.
#include "tiles.cuh"

GATE_UP_TILES(fp4_gate_up_tiles, fp4, 4)
