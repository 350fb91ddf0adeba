"""Training server for clients of the Tinker protocol, on the engines of this package."""
