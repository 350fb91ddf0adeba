"""Losses of the protocol as loss functions of an engine: sums over all tokens, one file each, by name in ``table.py``."""
