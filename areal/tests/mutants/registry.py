"""All bugs that the suite must catch, for every installed engine."""

from __future__ import annotations

from importlib.util import find_spec

import areal.tests.mutants.faults
import areal.tests.mutants.lora
import areal.tests.mutants.moe
import areal.tests.mutants.options
import areal.tests.mutants.pipeline
import areal.tests.mutants.prefixes
import areal.tests.mutants.step
import areal.tests.mutants.tensor_parallel
import areal.tests.mutants.timing
from areal.tests.mutants.planting import MUTANTS, plant

if find_spec("megatron") is not None:
    import areal.tests.mutants.megatron  # noqa: F401  # after those that it repeats


def plant_in_worker(name: str) -> None:
    """Plant a mutant until this process ends."""
    plant(MUTANTS[name])
