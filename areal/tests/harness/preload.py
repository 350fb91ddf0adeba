"""Imports the engines and what they import, in the fork server: once, before workers are forked from it."""

from __future__ import annotations

import contextlib

import transformers.models.auto.modeling_auto  # noqa: F401

from areal.engine.registry import engine_class, engine_names

for _name in engine_names():
    with contextlib.suppress(ValueError):  # its dependencies are not installed
        engine_class(_name)
