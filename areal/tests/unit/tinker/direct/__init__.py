"""Tests of the protocol's verbs as plain calls."""
