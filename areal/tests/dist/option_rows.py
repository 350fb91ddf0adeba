"""Rows of the table of options, and the place to edit if one is missing, not declared, or without effect."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

from pydantic import BaseModel

TABLE = "areal/tests/dist/test_options.py"


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of the fields of a configuration, of its groups, and of groups that may be ``None``."""
    for name, info in model.model_fields.items():
        kinds = [kind for kind in (info.annotation, *get_args(info.annotation)) if isinstance(kind, type)]
        group = next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
        if group is None or group is not info.annotation:
            yield f"{prefix}{name}"
        if group is not None:
            yield from leaves(group, f"{prefix}{name}.")


def rows_to_edit(rows: Iterable[str], config: type[BaseModel]) -> list[str]:
    """Return a line for each option without a row, and for each row without an option."""
    options, named = set(leaves(config)), set(rows)
    missing = [f"{name}: add its row to OPTIONS in {TABLE}, which shows its effect" for name in sorted(options - named)]
    return missing + [f"{name}: remove its row from OPTIONS in {TABLE}" for name in sorted(named - options)]


@contextmanager
def naming_the_declaration(engine: str, name: str) -> Iterator[None]:
    """Name the place of a declaration, if an engine refuses an option that it should honour."""
    try:
        yield
    except ValueError as error:
        if "does not support" in str(error):
            error.add_note(
                f"{name}: add it to supported_options in areal/engine/{engine}/engine.py (or to those of all engines in "
                f"areal/engine/options.py), or to REFUSED in {TABLE}"
            )
        raise


def no_effect(engine: str, name: str) -> str:
    """Return the place to edit for an option that changes nothing."""
    return f"{name} has no effect: read it in areal/engine/{engine}/engine.py or in what that builds, or add it to REFUSED in {TABLE}"


def differ(one: list[Any], other: list[Any]) -> bool:
    """Return whether two observations of an engine differ, floats beyond rounding."""
    if len(one) != len(other):
        return True
    return any(
        not math.isclose(x, y, rel_tol=1e-6) if isinstance(x, float) and isinstance(y, float) else x != y
        for x, y in zip(one, other, strict=True)
    )
