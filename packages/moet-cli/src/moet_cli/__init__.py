"""The moet command line: serve, demo, recipes, bench."""

__version__ = "0.1.0"

__all__ = ["__version__"]
