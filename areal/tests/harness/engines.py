"""Imports every installed engine, and what engines import when they are created: once, before workers are forked from the fork server."""

from __future__ import annotations

import contextlib

import transformers.models.auto.modeling_auto  # noqa: F401

from areal.engine.registry import engine_class, engine_names

for _name in engine_names():
    with contextlib.suppress(ValueError):  # its dependencies are not installed
        engine_class(_name)
