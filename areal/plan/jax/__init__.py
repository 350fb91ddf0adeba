"""Plans of the JAX engine: the programs of a step, compiled ahead of time for devices that are not there."""
