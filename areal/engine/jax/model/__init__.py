"""The model of the JAX engine: pure functions over arrays."""
