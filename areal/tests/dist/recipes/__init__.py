"""Recipes on real engines: runs of a few settings on every layout."""
