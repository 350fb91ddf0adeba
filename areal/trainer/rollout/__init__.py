"""Rollouts: sampled sequences with their log-probs and weight versions, and a runner that plays episodes."""
