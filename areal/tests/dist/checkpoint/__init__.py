"""Tests of checkpoints, adapters and weights on several ranks."""
