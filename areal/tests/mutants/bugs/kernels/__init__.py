"""Bugs of the head and of attention."""
