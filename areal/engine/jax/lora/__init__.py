"""Adapters of the JAX engine: their factors as arrays, and their contribution to a linear layer."""
