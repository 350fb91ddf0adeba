"""Tests of the JAX engine only."""
