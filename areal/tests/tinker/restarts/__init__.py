"""A server process that is killed while a client trains."""
