"""Planting of bugs: replaces one function of the library in every module that imports it, in each process that runs tests."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from areal.tests.harness.world import world

Function = Callable[..., Any]


@dataclass(frozen=True)
class Mutant:
    """A bug, and the tests that must catch it.

    Attributes:
        says: one sentence that describes the bug.
        target: the function to replace, as ``module:name`` or ``module:Class.name``, where it is defined.
        mutate: makes the wrong function from the right one.
        tests: each a test id below this directory, or fields of a grid cell (the first match is taken). ``*`` matches
            anything.
    """

    name: str
    says: str
    target: str
    mutate: Callable[[Function], Function]
    tests: tuple[str | Mapping[str, str], ...] = field(default=())


MUTANTS: dict[str, Mutant] = {}
"""All mutants by name."""


def mutant(target: str, *tests: str | Mapping[str, str]) -> Callable[[Callable[[Function], Function]], None]:
    """Register a factory of a wrong function; its name and docstring become those of the mutant."""

    def register(mutate: Callable[[Function], Function]) -> None:
        name = mutate.__name__
        if name in MUTANTS or not tests:
            raise ValueError(f"mutant {name!r}: give it a name of its own, and at least one test that must catch it")
        MUTANTS[name] = Mutant(name, inspect.getdoc(mutate) or "", target, mutate, tests)

    return register


def traces(name: str) -> Path:
    """Return the path of a file that exists once any process of the session has called the planted function."""
    return world().cache / f"planted-{name}"


def find_target(planted: Mutant) -> tuple[Any, str]:
    """Return the module or class that defines the function, and the function's name in it.

    Raises:
        AttributeError: there is no such function, or it is inherited.
    """
    module, _, path = planted.target.partition(":")
    *outer, attribute = path.split(".")
    owner = reduce(getattr, outer, importlib.import_module(module))
    if not inspect.isroutine(vars(owner).get(attribute)):
        raise AttributeError(f"mutant {planted.name!r}: {planted.target} defines no function {attribute!r}")
    return owner, attribute


def plant(planted: Mutant) -> pytest.MonkeyPatch:
    """Replace the function in this process. ``undo()`` of the result restores it."""
    owner, attribute = find_target(planted)
    original = vars(owner)[attribute]
    right = original.__func__ if isinstance(original, staticmethod) else original
    wrong = planted.mutate(right)

    @functools.wraps(right)
    def traced(*args: Any, **kwargs: Any) -> Any:
        traces(planted.name).touch()
        return wrong(*args, **kwargs)

    patch = pytest.MonkeyPatch()
    patch.setattr(owner, attribute, staticmethod(traced) if isinstance(original, staticmethod) else traced)
    if isinstance(owner, ModuleType):
        for module in list(sys.modules.values()):
            if module.__name__.startswith("areal.") and vars(module).get(attribute) is original:
                patch.setattr(module, attribute, traced)
    return patch
