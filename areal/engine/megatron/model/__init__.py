"""Megatron-Core models built from a Hugging Face configuration."""
