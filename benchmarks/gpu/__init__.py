"""Training steps on a GPU: model FLOP utilisation, memory of the head, idle time."""
