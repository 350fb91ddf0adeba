"""Tests of the JAX engine in one process."""
