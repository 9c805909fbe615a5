"""Expert kernels of moet: encoding on torch, the expert operation and its backends."""
