"""Offload of activations: what layers save for their backward is in host memory between forward and backward."""
