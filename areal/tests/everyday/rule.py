"""The everyday tests, which ``make test`` runs; ``make test-all`` runs all.

Every test in one process is everyday, and of a test on ranks the first case on one rank and the first on two. Of each kind of tests
that costs more (:data:`SAMPLES`), one file is everyday: the first case of each of its tests. Each layout of at most two ranks has its
three steps and one cell of the grid in float64.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from areal.tests.mutants.finding import GRID, short_id

EVERY_LAYOUT = (
    f"{GRID}::test_every_verb_agrees_with_the_reference",
    "dist/step/test_steps.py::test_three_steps_track_the_reference",
)
"""Tests of which the first case of each layout is everyday."""

SAMPLES = {
    "kills of a server process": "-",
    "a published SDK": "tinker/sdk/test_acceptance.py::test_both_versions",
    "Ray": "dispatch_ray/test_workers.py",
    "runs of policy optimisation": "dist/trainer/test_ppo.py",
    "example scripts": "-",
    "a real vLLM": "-",
    "another framework": "-",
    "a published agent": "-",
    "published chat templates": "-",
    "a recipe of the cookbook": "-",
    "torchrun's agents": "-",
    "JAX": "dist/jax/test_jax.py",
    "compiled layers": "dist/step/test_compile.py",
    "four ranks": "dist/parallel/test_vocab_parallel.py",
}
"""Kinds of tests that cost more than others, and the file (or test) of each that is everyday; ``-`` where there is none."""

NAMES = {
    r"^tinker/restarts/": "kills of a server process",
    r"^tinker/sdk/|_by_the_sdk_": "a published SDK",
    r"^tinker/cookbook/": "a recipe of the cookbook",
    r"^dispatch_ray/|_on_ray_": "Ray",
    r"^vllm/": "a real vLLM",
    r"^(verl|skyrl|trl)/": "another framework",
    r"^agents(_verifiers)?/": "a published agent",
    r"^chat/": "published chat templates",
    r"^dist/faults/test_torchrun_agents|_under_torchrun": "torchrun's agents",
    r"^dist/trainer/test_(ppo|one_owner)|_three_seeds_": "runs of policy optimisation",
    r"test_example_scripts\.py::test_script_runs": "example scripts",
    r"\bjax\b": "JAX",
    r"_compiled?_|test_compile\.py": "compiled layers",
}
"""Patterns of the ids of tests of such a kind; the first that fits counts."""


def mark_everyday(items: Sequence[pytest.Item]) -> None:
    """Add the marker ``everyday``, by the rule of this module."""
    seen: set[tuple[str, int]] = set()
    for item in items:
        size, kind = ranks(item), kind_of(item)
        if kind and not short_id(item).startswith(SAMPLES[kind]):
            continue
        # The first of each group: a test, or one layout of a test that has to run on every layout.
        group = (_group_of(item), 0 if kind else size)
        if (size == 0 and not kind) or (group not in seen and _may_be_first(item)):
            seen.add(group)
            item.add_marker(pytest.mark.everyday)


def kind_of(item: pytest.Item) -> str:
    """Return the kind in :data:`SAMPLES` of a test; empty for any other."""
    name, cell = short_id(item), _cell(item)
    for pattern, kind in NAMES.items():
        if re.search(pattern, name):
            return kind
    if cell is not None and cell.options == "compile":
        return "compiled layers"
    return "four ranks" if ranks(item) > 2 else ""


def ranks(item: pytest.Item) -> int:
    """Return how many ranks a test takes, in a pool or in processes that it starts; 0 for a test in one process."""
    return world_size(item) or (2 if item.get_closest_marker("own_world") else 0)


def _group_of(item: pytest.Item) -> str:
    """Return the name of the tests of which the first case is everyday."""
    name = short_id(item)
    test = name.partition("[")[0]
    return f"{test}[{_cell(item).layout.name}]" if test in EVERY_LAYOUT else test


def _may_be_first(item: pytest.Item) -> bool:
    """Return False for a case that shows less than those after it: a cell of the grid in a lower precision."""
    return not short_id(item).startswith(GRID) or _cell(item).dtype == "float64"


def _cell(item: pytest.Item) -> Any:
    """Return the cell of the grid that a test is about; None for any other test."""
    return item.callspec.params.get("cell") if hasattr(item, "callspec") else None


def world_size(item: pytest.Item) -> int:
    """Return how many ranks of a pool a test takes; 0 without the marker ``world``.

    Raises:
        ValueError: a marker with several sizes on a parameter.
    """
    marker = item.get_closest_marker("world")
    if marker is None:
        return 0
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if "world_size" in parameters:
        return int(str(parameters["world_size"]))
    if len(marker.args) != 1:
        raise ValueError(f"{item.nodeid}: a parameter is marked world{marker.args}; give one size there")
    return int(marker.args[0])
