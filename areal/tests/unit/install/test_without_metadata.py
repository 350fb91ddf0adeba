"""Names of engines and backends, without metadata of this package and with that of others.

The test of ``areal doctor`` trains with an engine of a copy without metadata.
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import areal.entry_points
from areal.engine.fsdp.engine import FSDPEngine
from areal.engine.registry import engine_class, engine_names
from areal.entry_points import BUILT_IN, ENGINE_GROUP, TRAINING_GROUP, registered_entry, registered_names
from areal.tests.unit.install.environments import ROOT, copy_package, run_isolated

LIST = """
import sys

sys.path.insert(0, sys.argv[1])
from areal.entry_points import registered_names

print(registered_names("areal.engines"), registered_names("areal.tinker_samplers"))
"""


def test_names_of_a_zip_archive(tmp_path: Path) -> None:
    copy_package(tmp_path / "copy")
    archive = shutil.make_archive(str(tmp_path / "archive"), "zip", tmp_path / "copy")
    done = run_isolated([sys.executable, "-I", "-S", "-c", LIST, archive], tmp_path)
    assert done.stdout.strip() == "['fsdp', 'jax', 'megatron'] ['local', 'vllm']", done.stderr


def test_table_and_pyproject_agree() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    own = {group: names for group, names in declared.items() if group.startswith("areal.")}
    assert own == {group: dict(names) for group, names in BUILT_IN.items()}


class _Distribution:
    def __init__(self, name: str) -> None:
        self.name = name


def declare(monkeypatch: pytest.MonkeyPatch, packages: Mapping[str, Mapping[str, str]], group: str) -> None:
    """Replace installed metadata by entry points of these packages."""
    points = []
    for package, names in packages.items():
        for name, value in names.items():
            point = EntryPoint(name, value, group)
            vars(point).update(dist=_Distribution(package))
            points.append(point)
    monkeypatch.setattr(
        areal.entry_points, "entry_points", lambda group: [point for point in points if point.group == group]
    )


def test_entry_points_add_names(monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, {"separate": {"replica": "separate:Engine"}}, ENGINE_GROUP)
    assert engine_names() == ["fsdp", "jax", "megatron", "replica"]
    entry = registered_entry(ENGINE_GROUP, "replica")
    assert entry is not None
    assert entry.value == "separate:Engine"
    assert "replica" not in registered_names(TRAINING_GROUP)
    assert registered_entry(ENGINE_GROUP, "nothing") is None


@pytest.mark.parametrize(
    "packages",
    [
        {"separate": {"fsdp": BUILT_IN[ENGINE_GROUP]["fsdp"]}},  # the same target
        {"areal": {"fsdp": "areal.engine.fsdp:OldEngine"}},  # metadata of an older copy of this package
    ],
)
def test_built_in_target_may_be_repeated(
    packages: Mapping[str, Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(monkeypatch, packages, ENGINE_GROUP)
    assert engine_class("fsdp") is FSDPEngine


def test_different_targets_of_a_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"fsdp": "mine:Engine", "replica": "mine:Replica"}
    declare(monkeypatch, {"mine": taken, "yours": {"replica": "yours:Replica"}}, ENGINE_GROUP)
    with pytest.raises(
        ValueError, match=r"'fsdp' .*'areal.engines'.*'areal.engine.fsdp.*of areal, 'mine:Engine' of mine"
    ):
        engine_class("fsdp")
    with pytest.raises(ValueError, match=r"'replica'.*'mine:Replica' of mine, 'yours:Replica' of yours; .*uninstall"):
        engine_class("replica")
    # The others are not affected.
    assert registered_entry(ENGINE_GROUP, "jax") is not None
