"""The expert operation in Triton: GPUs of sm_80 and newer, straight from encoded rows."""
