"""Tests of dispatch with engines."""
