"""Files of checkpoints: directories that appear whole, and what is damaged."""
