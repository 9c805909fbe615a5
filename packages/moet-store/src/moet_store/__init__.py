"""Packs of expert rows on disk: written safely, read at the speed of the drive, never trusted."""
