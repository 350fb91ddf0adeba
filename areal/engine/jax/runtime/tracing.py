"""Traces of JAX in the folder of a profile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import jax


@contextmanager
def traced(profile: AbstractContextManager[dict[int, Path]], rank: int, *, stacks: bool) -> Iterator[dict[int, Path]]:
    """Add a trace of JAX, in the subfolder ``jax-rank0`` of rank 0 and so on, to a profile of the template.

    Args:
        profile: context that gives the folder of each rank.
        rank: int. Number in the name of the subfolder.
        stacks: add calls of Python functions.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = int(stacks)
    with profile as folders, jax.profiler.trace(str(folders[rank] / f"jax-rank{rank}"), profiler_options=options):
        yield folders
