"""Other libraries as rows of the benchmark, each in an environment of its own."""
