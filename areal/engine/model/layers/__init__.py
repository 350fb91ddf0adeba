"""Layers of transformers' models as single functions with a hand-written backward."""
