"""Plans in one process."""
