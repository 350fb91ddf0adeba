"""Recipes of the published cookbook against the training server."""
