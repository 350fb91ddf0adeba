"""SkyRL, unmodified, on the engines of this library: run by ``make test-skyrl``."""
