"""Tests of the JAX engine: its processes, its programs and its placement."""
