"""Hand-written kernels: `.sass` sources, their CUDA C++ twins and the scripts that write the longer ones."""
