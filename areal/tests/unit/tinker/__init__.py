"""Tests of the Tinker-compatible server in one process."""
