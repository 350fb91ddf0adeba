"""verl trains on the engines of this library: ``engine=areal``, ``engine.backend=fsdp:d2``.

verl finds this package by its entry point ``verl.plugins``, and loads it with ``import verl``.
"""

from __future__ import annotations

import warnings

import verl
from packaging.version import Version

from areal.integrations.verl.config import ArealEngineConfig
from areal.integrations.verl.engine import ArealEngine

__all__ = ["ArealEngine", "ArealEngineConfig"]

TESTED = ("0.9.1", "0.9.1")
"""First and last release of verl that the tests have run with."""

if not Version(TESTED[0]) <= Version(verl.__version__) <= Version(TESTED[1]):
    warnings.warn(
        f"verl {verl.__version__}: areal.integrations.verl was tested with {' to '.join(dict.fromkeys(TESTED))}",
        stacklevel=2,
    )
