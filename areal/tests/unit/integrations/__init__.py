"""Tests of what the adapters of several frameworks use."""
