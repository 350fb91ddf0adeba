"""Optimizers whose updates need more than the elements of a shard."""
