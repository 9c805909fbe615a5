"""SASS for sm_90a and sm_120a: learn the encoding, assemble, link, audit and emulate.

Nothing here imports torch; only the learner, the linker's checks and the token-for-token audit
need programs of the CUDA toolkit (`moet_kernels.sass.tools` says which).
"""
