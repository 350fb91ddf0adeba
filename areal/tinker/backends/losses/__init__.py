"""Losses of the protocol as loss functions of an engine: sums over all tokens, by name in ``loss_table.py``."""
