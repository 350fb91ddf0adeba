"""Programs of the JAX engine, compiled ahead of time by the compiler of TPUs, on a CPU: ``make test-tpu``."""
