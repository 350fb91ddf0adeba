"""Tests of batches, packing and loaders."""
