"""The rounding of a real vLLM server."""
