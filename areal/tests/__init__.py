"""Tests: `unit` runs in one process, `dist` on every rank of a gloo world (or under torchrun)."""
