"""Test servers that receive weights without files, and the ways over which they do."""
