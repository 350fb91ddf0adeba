"""Installations: wheel and sdist, copies without metadata, the other project called areal, set-up, and ``areal doctor``."""
