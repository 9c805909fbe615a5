// Written by write_tiles.py's table of kernels. Twin of nv_down_tiles.sass.
#include "tiles.cuh"

DOWN_TILES_NV(nv_down_tiles, 4)
