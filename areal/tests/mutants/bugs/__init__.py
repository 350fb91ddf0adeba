"""Bugs that the suite must catch, by the part of the library that they break."""
