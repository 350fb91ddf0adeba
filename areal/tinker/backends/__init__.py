"""Backends of the training server: the verbs of the protocol on a model, found by entry point."""
