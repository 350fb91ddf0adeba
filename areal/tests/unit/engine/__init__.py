"""Tests of the engines' building blocks in one process."""
