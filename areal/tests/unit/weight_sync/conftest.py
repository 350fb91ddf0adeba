"""Fixtures of all tests of this folder."""

from areal.tests.unit.weight_sync.updates import control  # noqa: F401
