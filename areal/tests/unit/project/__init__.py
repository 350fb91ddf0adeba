"""Tests of the architecture, the documentation, the examples and the benchmarks."""
