"""The tests that ``make test`` runs: the rule, and a limit of their costs."""
