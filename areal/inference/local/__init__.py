"""A model in this process that generates, with continuous batching and adapters."""
