"""Measures a training step and plain loops, on the same data and weights, in one interleaved run. See docs/benchmarks.md."""
