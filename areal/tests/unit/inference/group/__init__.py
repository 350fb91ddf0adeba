"""Weights over a process group into inference servers."""
