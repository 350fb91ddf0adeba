"""The JAX engine. Needs the extra ``jax``."""
