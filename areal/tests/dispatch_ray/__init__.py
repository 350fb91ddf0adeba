"""Tests of ranks in Ray actors, in one Ray cluster for all sessions of a run."""
