"""Atomic checkpoint directories in the Hugging Face and the distributed format."""
