"""TRL runs on rollouts and engines of this package: ``make test-trl``."""
