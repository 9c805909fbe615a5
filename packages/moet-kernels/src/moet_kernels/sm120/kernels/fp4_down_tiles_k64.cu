// Written by write_tiles.py's table of kernels. Twin of fp4_down_tiles_k64.sass.
#include "tiles.cuh"

DOWN_TILES(fp4_down_tiles_k64, fp4, 2)
