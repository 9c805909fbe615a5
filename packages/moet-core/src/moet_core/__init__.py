"""Codecs, layouts, geometry and results of moet, on numpy and msgspec alone."""
