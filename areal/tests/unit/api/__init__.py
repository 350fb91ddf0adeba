"""Tests of the interface and its configuration."""
