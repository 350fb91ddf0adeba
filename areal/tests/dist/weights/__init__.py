"""Tests of weights that reach servers without files, from engines on several ranks."""
