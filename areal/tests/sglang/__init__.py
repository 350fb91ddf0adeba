"""Tests that need a real SGLang server, on the CPU."""
