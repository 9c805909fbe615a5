"""Hand-written kernels: `.sass` sources, their CUDA C++ twins and the script of the longer ones."""
