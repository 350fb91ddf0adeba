"""The installed releases have the private names that the library uses; ``areal/tests/lint/private_names.py`` lists them."""

from __future__ import annotations

import importlib
import inspect
import re
import sys

import pytest
import torch

from areal.tests.lint.private_names import JAX_NAMES, TORCH_GONE, TORCH_NAMES

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])


def test_names_of_torch_exist_in_their_releases() -> None:
    wrong = [
        f"{where}.{name} since {first}: {_defines(where, name)} in {TORCH}"
        for name, (where, first) in TORCH_NAMES.items()
        if _defines(where, name) != (first <= TORCH < TORCH_GONE.get(name, (sys.maxsize, 0)))
    ]
    assert not wrong


def test_names_of_jax_exist() -> None:
    pytest.importorskip("jax")
    assert not [f"{where}.{name}" for name, where in JAX_NAMES.items() if not _defines(where, name)]


@pytest.mark.parametrize(("name", "expected"), [("fsdp_params", True), ("no_such_name", False)])
def test_attributes_of_instances_are_found_in_the_source(name: str, expected: bool) -> None:
    assert _defines("torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup", name) == expected


def _defines(where: str, name: str) -> bool:
    """Return whether a module, or a class by its attributes or its source, defines ``name``."""
    module, _, path = where.partition(":")
    owner = importlib.import_module(module)
    for step in path.split(".") if path else ():
        owner = getattr(owner, step)
    if hasattr(owner, name) or not inspect.isclass(owner) or owner.__module__ not in sys.modules:
        return hasattr(owner, name)
    # Attributes of instances exist in the source of the module only.
    source = inspect.getsource(sys.modules[owner.__module__])
    return re.search(rf"\bself\.{name}\b", source) is not None
