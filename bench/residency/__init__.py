"""The trace study: routing of TinyMoE recorded, and the plot of what pools make of it."""
