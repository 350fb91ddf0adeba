"""Helpers that do not import the engine: collectives, devices, data, tensor functions and profiling."""
