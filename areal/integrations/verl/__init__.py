"""verl trains on the engines of this library: ``engine=areal``, ``engine.backend=fsdp:d2``.

verl finds this package by its entry point ``verl.plugins``, and loads it with ``import verl``.
"""

import verl

from areal.integrations.releases import warn_untested
from areal.integrations.verl.config import ArealEngineConfig
from areal.integrations.verl.engine import ArealEngine

__all__ = ["ArealEngine", "ArealEngineConfig"]

TESTED = ("0.9.1", "0.9.1")
"""First and last release of verl that the tests have run with."""

warn_untested("verl", verl.__version__, __name__, TESTED)
