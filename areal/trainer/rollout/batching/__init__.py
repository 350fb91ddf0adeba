"""Generation of many requests in one forward: the loop, adapters per request, and prompts that requests share."""
