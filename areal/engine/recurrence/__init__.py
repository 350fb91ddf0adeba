"""Layers with a state that passes from token to token, over packed sequences: linear attention, state spaces, short convolutions."""
