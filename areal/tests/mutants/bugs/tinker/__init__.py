"""Bugs of the Tinker server that the suite must catch."""
