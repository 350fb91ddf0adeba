"""Tests that run on every rank of a world of 1, 2 or 4 processes."""
