"""Weights over a process group into a real vLLM server."""
