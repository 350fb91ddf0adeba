"""Tests of what only the JAX engine has."""
