"""Faults: of a batch, a loss or the model on one rank, and ranks that are lost."""
