// Written by write_tiles.py's table of kernels. Twin of w2_down_tiles_k64.sass.
#include "tiles.cuh"

DOWN_TILES(w2_down_tiles_k64, w2, 2)
