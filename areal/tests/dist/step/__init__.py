"""Tests of the training step on several ranks."""
