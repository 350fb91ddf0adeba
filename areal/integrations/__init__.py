"""Engines of this library inside of other frameworks, each registered by the framework's own door."""
