"""Tests of the interface: configurations."""
