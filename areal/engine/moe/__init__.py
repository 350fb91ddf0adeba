"""Mixture of experts on any engine: balancing losses, replay of recorded routing, and load of the experts."""
