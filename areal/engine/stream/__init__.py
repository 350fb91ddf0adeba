"""The stream of packed tokens that a model runs: layout of sequences and prefixes, runs of adapters, rows of outputs."""
