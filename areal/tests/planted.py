"""All bugs that the suite must catch: those of every engine that is installed."""

from __future__ import annotations

from importlib.util import find_spec

import areal.tests.mutations
import areal.tests.mutations_clock
import areal.tests.mutations_lora
import areal.tests.mutations_moe
import areal.tests.mutations_pipeline
import areal.tests.mutations_sharing
import areal.tests.mutations_tensor_parallel
from areal.tests.planting import MUTANTS, plant

if find_spec("megatron") is not None:
    import areal.tests.mutations_megatron  # noqa: F401  # after those that it repeats


def plant_in_worker(name: str) -> None:
    """Plant a mutant for as long as this process lives."""
    plant(MUTANTS[name])
