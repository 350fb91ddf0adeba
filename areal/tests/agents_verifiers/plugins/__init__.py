"""Plugins of verifiers, found by the names of their modules: this folder is on the path of the tests."""
