"""Other libraries as rows of the benchmark, each in a separate environment."""
