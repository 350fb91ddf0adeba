"""Images that a vLLM server gets beside tokens."""
