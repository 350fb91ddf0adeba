"""Checks of structure and prose: ``python -m areal.tests.lint``."""
