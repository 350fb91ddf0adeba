"""The local model: batching, sampling, adapters, updates."""
