"""Bugs of the JAX engine that the suite must catch."""
