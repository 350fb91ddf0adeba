"""Tests of the training server for clients of the Tinker protocol."""
