"""Low-rank adapters, for any engine whose linear layers are known by their Hugging Face names."""
