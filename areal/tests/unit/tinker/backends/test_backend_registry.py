"""Backends of other packages are found by entry point, without a change of this one."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from areal.tinker.backends.backend_registry import (
    SAMPLING_GROUP,
    TRAINING_GROUP,
    create_sampling_backend,
    create_training_backend,
)
from areal.tinker.backends.training.engine_backend import create

ROOT = Path(__file__).parents[5]

MODULE = '''
from areal.tinker.backends.prepared import AdapterSpec
from areal.tinker.backends.backend import ModelLimits, TrainingBackend


class Constant:
    """A backend without a model."""

    def __init__(self, model, backend, config):
        self.made = (model, backend, dict(config))

    def limits(self):
        return ModelLimits(vocab_size=7, max_tokens=5, max_rank=3)

    def healthy(self):
        return True
'''

PROGRAM = """
from areal.tinker.backends.backend_registry import backend_names, create_sampling_backend, create_training_backend

assert "constant" in backend_names("areal.tinker_backends")
made = create_training_backend("model", "constant:any:layout", {"a": 1})
assert type(made).__module__ == "areal_constant"
assert made.made == ("model", "constant:any:layout", {"a": 1})
assert (made.limits().vocab_size, made.healthy()) == (7, True)
try:
    create_training_backend("model", "broken", {})
except ValueError as error:
    assert "needs what is not installed" in str(error), error
    assert "no_such_module" in str(error)
else:
    raise AssertionError("loaded")
print("found")
"""


def test_backend_of_another_package_is_found(tmp_path: Path) -> None:
    """The package is installed as pip leaves it: a module, and a directory with its metadata."""
    (tmp_path / "areal_constant.py").write_text(MODULE)
    metadata = tmp_path / "areal_constant-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: areal-constant\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[{TRAINING_GROUP}]\nconstant = areal_constant:Constant\nbroken = no_such_module:create\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "found"


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"backend = 'nothing': installed are .*fsdp.*areal.tinker_backends"):
        create_training_backend("model", "nothing:d1", {})
    with pytest.raises(ValueError, match=r"sampler = 'nothing': installed are .*areal.tinker_samplers"):
        create_sampling_backend("model", "nothing", {})


def test_own_backends_are_declared() -> None:
    """Both engines have the same factory."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(declared[TRAINING_GROUP]) == set(declared["areal.engines"]) == {"fsdp", "jax", "megatron"}
    for name, value in declared[TRAINING_GROUP].items():
        assert EntryPoint(name, value, TRAINING_GROUP).load() is create
    assert SAMPLING_GROUP in declared
