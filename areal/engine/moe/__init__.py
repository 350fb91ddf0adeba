"""Mixture-of-experts routing: balancing losses, replay of recorded routing, and expert load."""
