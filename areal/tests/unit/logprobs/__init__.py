"""Log-probs of a language model head, and their memory."""
