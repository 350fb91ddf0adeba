"""A Hugging Face model that takes packed tokens and returns per-token outputs."""
