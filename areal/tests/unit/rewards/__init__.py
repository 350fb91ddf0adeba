"""Tests of rewards: verifiers, programs of a model, and judges."""
