"""Fixtures of all tests of this folder."""

from areal.tests.unit.weight_sync.transports import control, socket_dir  # noqa: F401
