"""Sampling on a running vLLM server, over HTTP."""
