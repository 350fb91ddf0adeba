"""Tests of the paths that only a GPU takes, run on a CPU with stand-ins."""
