"""Engines on the meta device, as one rank of a world that does not exist."""
