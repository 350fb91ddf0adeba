"""Callers of the server: who owns what, how much each owner may use, and the verbs that a caller may use."""
