"""The optimizer of the Megatron-Core engine."""
