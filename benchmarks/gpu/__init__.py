"""What a GPU makes of a training step: model FLOP utilisation, memory of the head, idle time."""
