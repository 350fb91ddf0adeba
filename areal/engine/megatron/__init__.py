"""The Megatron-Core engine, its weights and its checkpoints. Requires the extra ``megatron``."""
