"""Serves real-width models of small depth on one GPU: starts, identity and speed of engines."""
