"""Checks that a server and a directory have the model that is trained."""
