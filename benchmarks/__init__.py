"""Compares a training step with plain loops on the same data and weights, in one interleaved run.

See docs/performance.md.
"""
