"""Bugs of rollouts, of the servers that they run on, and of their episodes."""
