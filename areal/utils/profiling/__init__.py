"""Measurements of time and memory: phase timer, profiler and memory timeline."""
