"""Models that generate: local ones, and those of servers."""
