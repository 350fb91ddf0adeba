"""The sampler on vLLM servers."""
