"""Bugs of models and their layers that the suite must catch."""
