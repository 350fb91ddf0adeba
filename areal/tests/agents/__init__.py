"""Tests with published clients and agent frameworks, in an environment of their own: `make test-agents`."""
