"""Layers with a hand-written backward."""
