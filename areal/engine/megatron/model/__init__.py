"""The Megatron-Core model: its configuration, layers, rotary angles, and the chunk that takes packed tokens."""
