"""Expert layers on SM120: hand-written SASS, CUDA C++ twins, and their checks.

`layer` computes; `trust` decides on a device which variant of each kernel may; `write` and `build`
make the kernels; `cases` and `emulated` run them without a GPU.
"""
