"""Tests of the Tinker-compatible server."""
