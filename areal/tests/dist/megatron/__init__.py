"""Tests of the Megatron-Core engine only."""
