"""Sections of an engine's configuration: of every engine, and of each one by its name."""
