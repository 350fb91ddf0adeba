"""The table of dispatch has each member of the interface, and a group has the signatures of an engine."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from areal.api import Adapters, TrainEngine
from areal.dispatch import WorkerGroup
from areal.dispatch.table import TABLE, GroupAdapters, dispatch_table


def members(interface: type) -> dict[str, Any]:
    """Return methods, properties and attributes of an interface, also of those that it extends."""
    public = {
        name: value
        for each in reversed(interface.__mro__)
        if each.__module__.startswith("areal.")
        for name, value in vars(each).items()
        if not name.startswith("_")
    }
    return {**dict.fromkeys(interface.__annotations__), **public}


def test_every_member_has_a_row() -> None:
    expected = {*members(TrainEngine), *(f"adapters.{name}" for name in members(Adapters))}
    assert set(TABLE) == expected


@pytest.mark.parametrize(("interface", "group"), [(TrainEngine, WorkerGroup), (Adapters, GroupAdapters)])
def test_group_has_the_signatures_of_the_interface(interface: type, group: type) -> None:
    for name, member in members(interface).items():
        own = next(
            (vars(each)[name] for each in group.__mro__ if each not in interface.__mro__ and name in vars(each)), None
        )
        if inspect.isfunction(member):
            mine, theirs = inspect.signature(own), inspect.signature(member)
            # A group may add keywords.
            assert list(mine.parameters.items())[: len(theirs.parameters)] == list(theirs.parameters.items()), name
        elif isinstance(member, property) and getattr(member, "__isabstractmethod__", False):
            assert isinstance(own, property), name


def test_table_in_markdown_names_every_member_once() -> None:
    text = dispatch_table()
    for name in TABLE:
        assert text.count(f"`{name}`") == 1, name


def test_docs_show_the_tables_once() -> None:
    page = (Path(__file__).parents[4] / "docs" / "dispatch.md").read_text()
    assert page.count(dispatch_table()) == 1
    assert page.count("| members | use |") == 1
