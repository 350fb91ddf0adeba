"""Tests of the server's training backend on an engine in this process."""
