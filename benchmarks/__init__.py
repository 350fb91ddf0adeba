"""Measures a training step beside plain loops, on the same data and weights, in one interleaved run. See docs/benchmarks.md."""
