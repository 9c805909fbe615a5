"""Sources and cubins of the SM120 kernels; `moet_kernels.sm120.build` makes the cubins."""
