// Written by write_tiles.py's table of kernels. Twin of w2_down_tiles.sass.
#include "tiles.cuh"

DOWN_TILES(w2_down_tiles, w2, 4)
