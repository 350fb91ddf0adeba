"""Data of recipes: rows from files, what they mean, and their tokens."""
