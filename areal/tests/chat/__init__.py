"""Chat templates of published models, from the package of TRL: run by ``make test-templates``."""
