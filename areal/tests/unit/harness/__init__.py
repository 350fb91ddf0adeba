"""Tests of the test infrastructure."""
