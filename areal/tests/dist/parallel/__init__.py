"""Tests of tensor, context, pipeline and expert parallelism."""
