"""Rollouts: prompts are sent to generation, episodes are scored, and trajectories come back as training batches."""
