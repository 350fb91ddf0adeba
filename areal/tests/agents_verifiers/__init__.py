"""Tasksets and harnesses of verifiers as episodes."""
