"""The FSDP2 engine: Hugging Face models on PyTorch's ``fully_shard``."""
