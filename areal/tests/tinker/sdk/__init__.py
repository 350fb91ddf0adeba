"""Tests with the published SDK, in an environment for each version, against a server process."""
