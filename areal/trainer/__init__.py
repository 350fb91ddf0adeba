"""Algorithms: they hold an engine and call its verbs."""
