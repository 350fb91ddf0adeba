"""The FSDP2 engine: trains Hugging Face models with PyTorch's ``fully_shard``."""
