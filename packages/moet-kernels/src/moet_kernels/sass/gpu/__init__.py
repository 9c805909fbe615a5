"""Run a bundle on a GPU: `python -m moet_kernels.sass.gpu BUNDLE OUT [SECONDS]`.

A bundle is a folder that `moet_kernels.sass.bundle` makes: cubins, inputs, what the emulator gives,
and plan.json. This package needs numpy and cuda-bindings alone, so that it runs from a checkout on
a machine where nothing of moet is installed (PYTHONPATH=packages/moet-kernels/src).

A kernel that crashes takes its process's context with it, so whatever may crash runs in a process
of its own (`task`), and a watchdog ends those that hang.
"""
