"""Tests of advantages and rollouts."""
