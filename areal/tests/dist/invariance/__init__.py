"""Numbers whose bits do not depend on the batch: of the trainer alone, and of trainer and sampler."""
