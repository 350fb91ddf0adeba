"""A tiny model with a tokenizer of characters, and data, for runs of recipes and examples."""
