"""Tests of recipes that need no engine: rows, formats, settings, evaluation, record."""
