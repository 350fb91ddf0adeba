"""Tests of dispatch in one process."""
