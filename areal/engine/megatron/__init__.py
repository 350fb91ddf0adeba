"""The Megatron-Core engine. Everything here needs the extra ``megatron``."""
